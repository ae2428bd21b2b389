"""Batch inference for Mixture-of-Experts models: `from moe import LLM, SamplingParams`.

Another distribution is named `kernels` too, and transformers imports it where it is installed. Ours is a namespace
package and gives way to it; so that both can be used, our folder is added to whichever `kernels` was found, before
anything of ours imports from it.
"""

from pathlib import Path

import kernels

_OUR_KERNELS = str(Path(__file__).resolve().parent.parent / "kernels")
if _OUR_KERNELS not in list(kernels.__path__):
    kernels.__path__.append(_OUR_KERNELS)

from moe.engine.llm import LLM  # noqa: E402
from moe.engine.request import CompletionOutput, RequestOutput, SamplingParams  # noqa: E402
from moe.version import __version__  # noqa: E402

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]
