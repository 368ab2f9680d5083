"""Twenty-four architectures as their packages define them, small and with random weights.

Nothing is downloaded. Sizes are small so that a training step takes seconds on a CPU; layers, their
order and the Python around them are the packages' own. Dropout is off: its masks could not be
compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

VOCABULARY, LENGTH, BATCH = 99, 16, 2
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Case:
    """A model, and the arguments of one call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return next(self.model.parameters()).device.type

    def on(self, device: str) -> Case:
        """The same case on another device."""
        moved: Callable[[Any], Any] = lambda each: each.to(device)  # noqa: E731
        args, kwargs = pytree.tree_map_only(torch.Tensor, moved, (self.args, self.kwargs))
        return Case(self.model.to(device), args, kwargs)


# The operators that torchvision describes to PyTorch when it is imported.
_DESCRIBED = ("nms", "qnms")
_STAND_INS: list[torch.library.Library] = []


def packages(names: Sequence[str] = ("torchvision", "timm", "transformers")) -> None:
    """Import the packages, or raise ImportError.

    If torchvision's compiled operators are for another build of PyTorch, it cannot be imported. Its
    models do not need them, so that empty ones of their names will do.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ImportError("torchvision is not installed")
    try:
        torch.ops.load_library(str(next(Path(found.origin).parent.glob("_C*"))))
    except OSError:
        if not _STAND_INS:
            _STAND_INS.append(torch.library.Library("torchvision", "DEF"))
            for name in _DESCRIBED:
                _STAND_INS[0].define(f"{name}(Tensor dets) -> Tensor")
    for name in names:
        importlib.import_module(name)


def _images(size: int = 64) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def _words(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def _torchvision(name: str, size: int = 64, **settings: Any) -> Case:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=10, **settings)
    return Case(_without_dropout(model), (_images(size),))


def _timm(name: str, size: int = 64, **settings: Any) -> Case:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10, **settings)
    return Case(_without_dropout(model), (_images(size),))


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if type(module).__name__ in ("StochasticDepth", "DropPath"):
            module.p = module.drop_prob = 0.0  # type: ignore[assignment]
    return model


def _inception() -> Case:
    case = _torchvision("inception_v3", 96, aux_logits=False, init_weights=False)
    return Case(case.model, (_images(96),))


def _densenet() -> Case:
    from torchvision.models import DenseNet

    return Case(DenseNet(8, (2, 3, 3, 2), 16, num_classes=10), (_images(),))


def _vgg() -> Case:
    """Without its three linear layers, which have nine tenths of its weights."""
    case = _torchvision("vgg11_bn", 32)
    case.model.avgpool, case.model.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 10)
    return case


def _language(kind: str, configuration: str, settings: dict[str, Any]) -> Case:
    """A causal language model, with its loss."""
    import transformers

    config = getattr(transformers, configuration)(**{**_ENDS, **settings})
    words = _words()
    return Case(getattr(transformers, kind)(config), (), {"input_ids": words, "labels": words})


def _gpt2() -> Case:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
    settings |= {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _language("GPT2LMHeadModel", "GPT2Config", settings)


def _grouped(name: str) -> Case:
    settings = {**_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return _language(f"{name}ForCausalLM", f"{name}Config", settings)


def _falcon() -> Case:
    settings = {**_TEXT, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return _language("FalconForCausalLM", "FalconConfig", settings)


def _mamba() -> Case:
    settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    settings |= {"state_size": 8, "use_mambapy": False}
    return _language("MambaForCausalLM", "MambaConfig", settings)


def _bert() -> Case:
    import transformers

    model = transformers.BertModel(transformers.BertConfig(**_TEXT, **_NO_DROPOUT))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 10:] = 0
    return Case(model, (), {"input_ids": _words(), "attention_mask": mask})


def _deberta() -> Case:
    import transformers

    config = transformers.DebertaV2Config(
        **_TEXT, **_NO_DROPOUT, relative_attention=True, pos_att_type=["c2p", "p2c"]
    )
    return Case(transformers.DebertaV2Model(config), (), {"input_ids": _words()})


def _t5() -> Case:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, **_ENDS,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return Case(model, (), {"input_ids": _words(), "labels": _words(8)})


def _vit() -> Case:
    import transformers

    settings = {name: value for name, value in _TEXT.items() if name != "vocab_size"}
    config = transformers.ViTConfig(image_size=32, patch_size=8, **settings, **_NO_DROPOUT)
    return Case(transformers.ViTModel(config), (), {"pixel_values": _images(32)})


def _clip() -> Case:
    import transformers

    vision = {name: value for name, value in _TEXT.items() if name != "vocab_size"}
    config = transformers.CLIPConfig(
        text_config={**_TEXT, **_ENDS},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    words = _words()
    words[:, -1] = 2
    given = {"input_ids": words, "pixel_values": _images(32), "return_loss": True}
    return Case(transformers.CLIPModel(config), (), given)


def _whisper() -> Case:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, num_mel_bins=16,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=24, max_target_positions=32,
        decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], **_ENDS,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    given = {"input_features": torch.randn(BATCH, 16, 48), "labels": _words(8)}
    return Case(model, (), given)


VISION: dict[str, Callable[[], Case]] = {
    "ResNet": lambda: _torchvision("resnet18"),
    "ConvNeXt": lambda: _timm("convnext_atto"),
    "EfficientNet": lambda: _torchvision("efficientnet_b0"),
    "MobileNet": lambda: _torchvision("mobilenet_v3_small"),
    "RegNet": lambda: _torchvision("regnet_y_400mf"),
    "DenseNet": _densenet,
    "ViT": lambda: _timm("vit_tiny_patch16_224", img_size=64, depth=3),
    "Swin": lambda: _timm(
        "swin_tiny_patch4_window7_224", img_size=56, size=56, embed_dim=24, depths=(1, 1, 2, 1)
    ),
    "MaxViT": lambda: _timm("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32, 32, 64, 64)),
    "Inception": _inception,
    "ShuffleNet": lambda: _torchvision("shufflenet_v2_x0_5"),
    "VGG": _vgg,
}
TEXT: dict[str, Callable[[], Case]] = {
    "BERT": _bert,
    "GPT-2": _gpt2,
    "Llama": lambda: _grouped("Llama"),
    "Mistral": lambda: _grouped("Mistral"),
    "Qwen2": lambda: _grouped("Qwen2"),
    "T5": _t5,
    "ViT (transformers)": _vit,
    "CLIP": _clip,
    "Whisper": _whisper,
    "Mamba": _mamba,
    "DeBERTa": _deberta,
    "Falcon": _falcon,
}
ZOO = {**VISION, **TEXT}
