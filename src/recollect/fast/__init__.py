"""The unroll at the speed of the chip: `passes` gives the fastest ones for a network, and says so where those are for any.

byhand.py: the ConvNet by hand; kernels.py, convnet.py: on a GPU; cpu_kernels.py, cpu.py: on a CPU; layout.py: which networks
fit, and their weights as one vector. chain.py, patches.py, patch_kernels.py: MLPs and La-MAML's
network by hand; span.py: MLPs in the coordinates of a few bases. flat.py: any network, on one vector of weights; compiled.py: by
torch.compile. engine.py: captured steps.
"""

import ctypes
import importlib.util
import platform
import warnings
from functools import cache
from typing import Literal

import torch

from recollect import unroll
from recollect.errors import RecollectError
from recollect.fast import chain, layout
from recollect.fast.flat import Flat, General, Pieces
from recollect.nets import Network

Compute = Literal["auto", "bf16", "tf32", "fp32"]
MOST_IMAGES = 4096  # in one pass of the ConvNet's kernels, whose offsets are 32-bit
NO_TRITON = "Triton is not installed, which the ConvNet's kernels are written in (pip install triton)"
WIDE = 32  # from here on a processor's bf16 pays
NO_NUMBA = "numba is not installed, which the ConvNet's kernels on a CPU are written in (pip install numba)"
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt
_said: set[str] = set()


def passes(
    network: Network, device: str, compute: Compute = "auto", compile: bool = False, half: bool = True
) -> tuple[Flat, str]:
    """The passes for a network on a device, and the precision they compute in.

    "auto" is bf16 where the ConvNet's kernels run and for chains with convolutions (TF32 without `half`), and TF32 for other
    networks. On a CPU it is bf16 for ConvNets of width 32 or more where the processor multiplies in it, else fp32.
    """
    check(compute, device)
    if not device.startswith("cuda"):
        return _on_cpu(network, compute, compile)
    wanted = ("bf16" if half else "tf32") if compute == "auto" else compute
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8 and wanted != "fp32":
        _say(f"{torch.cuda.get_device_name(device)} has neither bf16 nor TF32 (compute capability {major}): computing in fp32")
        wanted = "fp32"
    reason = layout.unfit(network) if importlib.util.find_spec("triton") else NO_TRITON
    if reason is None:
        from recollect.fast.convnet import ConvNet

        return Pieces(ConvNet(network, wanted), MOST_IMAGES), wanted
    if wanted == "bf16" and network.convolves and chain.fits(network):
        return chain.Half(network), wanted
    if wanted == compute == "bf16":
        _say(f"bf16 is for the ConvNet's kernels and chains with convolutions, and {reason}: computing in TF32")
    wanted = "tf32" if wanted == "bf16" else wanted
    if not chain.fits(network):
        _say(f"the general path runs this network: {reason}")
    return any_network(network, compile), wanted


def _on_cpu(network: Network, compute: Compute, compile: bool) -> tuple[Flat, str]:
    keep_pages()
    reason = layout.unfit(network)
    if reason is None and importlib.util.find_spec("numba"):
        from recollect.fast.cpu import CpuConvNet

        flat = CpuConvNet(network, "fp32")
        if compute == "bf16" or (compute == "auto" and flat.width >= WIDE and computes_in_bf16()):
            return CpuConvNet(network, "bf16"), "bf16"
        return flat, "fp32"
    if compute == "bf16":
        _say(f"bf16 on a CPU is for the ConvNet's kernels, and {reason or NO_NUMBA}: computing in fp32")
    elif reason is None:
        _say(f"the general path runs this network, several times slower: {NO_NUMBA}")
    return any_network(network, compile), "fp32"


@cache
def keep_pages() -> bool:
    """Has the allocator keep what is freed, for the rest of the process; whether it is one that can.

    glibc gives large tensors back to the system as soon as they are freed, and asks for them again at the next step; the
    system clears every page anew. In an unroll on a CPU that was half of the time.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {MMAP_THRESHOLD: 2**30, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 2**28}
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) for name, value in settings.items()])


def check(compute: str, device: str) -> None:
    if device.startswith("cuda") or compute in ("auto", "fp32"):
        return
    if compute != "bf16":
        raise RecollectError(f"compute is {compute}, which needs a CUDA device: give fp32 or auto")
    if not computes_in_bf16():
        raise RecollectError(
            "compute is bf16, which this processor has no instructions for (AVX512-BF16, AMX): give fp32 or auto"
        )


def computes_in_bf16() -> bool:
    """Whether the processor multiplies in bfloat16."""
    found = getattr(torch.cpu, "get_capabilities", dict)()
    return any(there for name, there in found.items() if name.endswith("bf16"))


def any_network(network: Network, compile: bool = False) -> General:
    """The passes for a network on any device: a chain's by hand, others' from its loss."""
    if chain.fits(network):
        return chain.Chain(network)
    if not compile:
        return General(network, unroll.eager(network.loss))
    from recollect.fast.compiled import compiled  # takes a second to import

    return General(network, compiled(network.loss))


def _say(line: str) -> None:
    """Once."""
    if line not in _said:
        _said.add(line)
        warnings.warn(line, stacklevel=3)
