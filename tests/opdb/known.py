"""Differences from eager mode that are known, each with its reason. Anything else is a failure."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from tests.opdb.cases import Entry


@dataclass(frozen=True)
class Known:
    """`operators`, `dtypes`, `variants` and `words` are patterns, as of file names."""

    operators: str
    reason: str
    words: str = "*"
    dtypes: str = "*"
    variants: str = "*"
    device: str = "*"

    def is_about(self, entry: Entry, variant: str, device: str, words: str) -> bool:
        pairs = (
            (self.operators, entry.name),
            (self.dtypes, entry.dtype),
            (self.variants, variant),
            (self.device, device),
            (self.words, words),
        )
        return all(
            any(fnmatch.fnmatchcase(text, each) for each in pattern.split("|"))
            for pattern, text in pairs
        )


_UNSET = "its memory is not initialised: eager gives other numbers at each call, too"
_LAYOUT = "the strides of this gradient: PyTorch's shape functions say others than its kernels have"
_ABORT = "eager itself ends the process"
_ZERO = "the sign of zero: eager's vector code and its scalar code differ, or it takes either zero"
_NAN = "beside NaN or infinity, PyTorch's decomposition of its backward differs from its kernel"
_PHASE = "eager's backward checks a value that a trace does not have"

KNOWN = (
    Known(
        "empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided|resize_|"
        "resize_as_",
        _UNSET,
    ),
    Known("nn.functional.multilabel_margin_loss", _UNSET, variants="empty"),
    Known(
        "dist|norm|norm-*|max-reduction_no_dim|min-reduction_no_dim|median|nanmedian|normal|"
        "normal-number_mean|ormqr|prod|stft|tensor_split|pca_lowrank|svd_lowrank|"
        "linalg.householder_product|linalg.lstsq|linalg.lstsq-*|linalg.matrix_norm|"
        "nn.functional.*_loss|nn.functional.multi_head_attention_forward|"
        "nn.functional.fractional_max_pool?d|nn.functional.pad-*|nn.functional.pairwise_distance|"
        "nn.functional.scaled_dot_product_attention|nn.*Loss",
        _LAYOUT,
        words="*gradient of *: strides *",
    ),
    Known("native_dropout_backward", "by way of Dynamo, " + _LAYOUT, words="output ?: strides *"),
    Known("_chunk_cat|nn.functional.pdist", _ABORT, words="eager: the process ended*"),
    Known(
        "fmax|fmin|nn.functional.softshrink|nn.functional.relu|nn.functional.relu6|copysign|sinc",
        _ZERO,
        words="*misplaced: *0, eager *0",
        variants="special",
    ),
    Known("copysign", "the sign of NaN is not specified", variants="special"),
    Known(
        "polar|prod|native_group_norm|nn.functional.hardswish",
        _NAN,
        words="*misplaced*",
        variants="special|strewn",
    ),
    Known("linalg.eig", _PHASE, words="ours ends with no error, eager with backward*"),
)


def reason_for(entry: Entry, variant: str, device: str, words: str) -> str:
    """Why this difference is there. Empty if nobody has said so."""
    found = (each for each in KNOWN if each.is_about(entry, variant, device, words))
    return next((each.reason for each in found), "")
