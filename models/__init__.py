"""Networks as ``torch.nn.Sequential``, with torchvision's names, shapes and results.

A state_dict of torchvision's loads unchanged into the model of the same name; nothing is
downloaded, and torchvision is not needed. The networks of the experiments with dynamic
rematerialization are here too, as plain modules if they are no chains; `workloads` trains them.
"""

from . import cifar as cifar
from . import densenet as densenet
from . import gan as gan
from . import gpt as gpt
from . import inception as inception
from . import inceptionv4 as inceptionv4
from . import recurrent as recurrent
from . import resnet as resnet
from . import transformer as transformer
from . import treelstm as treelstm
from . import unet as unet
from . import utils as utils
from . import vgg as vgg
from . import workloads as workloads
from .cifar import CifarDenseNet as CifarDenseNet
from .cifar import CifarResNet as CifarResNet
from .cifar import densenet100 as densenet100
from .cifar import resnet20 as resnet20
from .cifar import resnet32 as resnet32
from .cifar import resnet44 as resnet44
from .cifar import resnet56 as resnet56
from .cifar import resnet110 as resnet110
from .cifar import resnet1202 as resnet1202
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
from .inceptionv4 import Inception4 as Inception4
from .inceptionv4 import inception_v4 as inception_v4
from .recurrent import GRU as GRU
from .recurrent import LSTM as LSTM
from .recurrent import GRUEncoder as GRUEncoder
from .recurrent import LSTMEncoder as LSTMEncoder
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
from .transformer import Transformer as Transformer
from .treelstm import TreeLSTM as TreeLSTM
from .unet import UNet as UNet
from .vgg import VGG as VGG
from .vgg import vgg11 as vgg11
from .vgg import vgg11_bn as vgg11_bn
from .vgg import vgg13 as vgg13
from .vgg import vgg13_bn as vgg13_bn
from .vgg import vgg16 as vgg16
from .vgg import vgg16_bn as vgg16_bn
from .vgg import vgg19 as vgg19
from .vgg import vgg19_bn as vgg19_bn
