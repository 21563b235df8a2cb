"""Networks as ``torch.nn.Sequential``, with torchvision's names, shapes and results.

A state_dict of torchvision's loads unchanged into the model of the same name; nothing is
downloaded, and torchvision is not needed.
"""

from . import densenet as densenet
from . import gpt as gpt
from . import inception as inception
from . import resnet as resnet
from . import utils as utils
from . import vgg as vgg
from .densenet import DenseNet as DenseNet
from .densenet import densenet121 as densenet121
from .densenet import densenet161 as densenet161
from .densenet import densenet169 as densenet169
from .densenet import densenet201 as densenet201
from .gpt import GPT as GPT
from .gpt import GPTSettings as GPTSettings
from .gpt import gpt2 as gpt2
from .gpt import gpt2_large as gpt2_large
from .gpt import gpt2_medium as gpt2_medium
from .gpt import gpt2_xl as gpt2_xl
from .inception import Inception3 as Inception3
from .inception import InceptionOutputs as InceptionOutputs
from .inception import inception_v3 as inception_v3
from .resnet import ResNet as ResNet
from .resnet import resnet18 as resnet18
from .resnet import resnet34 as resnet34
from .resnet import resnet50 as resnet50
from .resnet import resnet101 as resnet101
from .resnet import resnet152 as resnet152
from .resnet import resnext50_32x4d as resnext50_32x4d
from .resnet import resnext101_32x8d as resnext101_32x8d
from .resnet import resnext101_64x4d as resnext101_64x4d
from .resnet import wide_resnet50_2 as wide_resnet50_2
from .resnet import wide_resnet101_2 as wide_resnet101_2
from .vgg import VGG as VGG
from .vgg import vgg11 as vgg11
from .vgg import vgg11_bn as vgg11_bn
from .vgg import vgg13 as vgg13
from .vgg import vgg13_bn as vgg13_bn
from .vgg import vgg16 as vgg16
from .vgg import vgg16_bn as vgg16_bn
from .vgg import vgg19 as vgg19
from .vgg import vgg19_bn as vgg19_bn
