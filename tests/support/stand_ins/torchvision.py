"""Stands in for torchvision where DeepSpeed's examples run: random pictures, small models, the names they use.

torchvision is built for one version of torch, and the data sets come from the network; neither says anything of ds_npu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

SAMPLES = 64


class Pictures(torch.utils.data.Dataset):
    """The same random pictures in every process."""

    def __init__(self, transform: Callable[[Any], Any] | None = None, size: Sequence[int] = (3, 32, 32)) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=numbers).tolist()
        self.pictures = torch.rand(SAMPLES, *size, generator=numbers)
        self.transform = transform or (lambda picture: picture)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.pictures[index]), self.labels[index]


def cifar10(root: str, train: bool = True, download: bool = False, transform: Any = None) -> Pictures:
    return Pictures(transform)


def compose(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def composed(picture: Any) -> Any:
        for step in steps:
            picture = step(picture)
        return picture

    return composed


def normalize(mean: Sequence[float], std: Sequence[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    def normalized(picture: torch.Tensor) -> torch.Tensor:
        return (picture - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    return normalized


def unchanged(*sizes: int) -> Callable[[Any], Any]:
    return lambda picture: picture


class AlexNet(nn.Module):
    """The parts of torchvision's, with a thousandth of its weights; without dropout, so that a run can be repeated."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(picture)), 1))


datasets = SimpleNamespace(CIFAR10=cifar10)
transforms = SimpleNamespace(
    Compose=compose, Resize=unchanged, CenterCrop=unchanged, ToTensor=unchanged, Normalize=normalize
)
models = SimpleNamespace(AlexNet=AlexNet, vgg19=AlexNet)
# `import torchvision.models` finds what stands here.
PARTS = {"datasets": datasets, "transforms": transforms, "models": models}
sys.modules.update({f"torchvision.{name}": part for name, part in PARTS.items()})
