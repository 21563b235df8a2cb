"""``python -m accelerator``: build the device, and print the path of its library."""

from accelerator.build import library

print(library())
