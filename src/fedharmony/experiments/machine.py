"""The machine a run computes on: its device, threads and switches of torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from fedharmony import fallbacks
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu.barrier import compiler_is_safe
from fedharmony.engine.gpu.payoff import compiling_pays
from fedharmony.errors import ConfigError
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.settings import EngineSettings, Settings
from fedharmony.transport.processes import process_group

#: Where Linux shows the first GPU of NVIDIA, whatever torch sees of it.
GPU = Path("/dev/nvidia0")
#: Of a GPU's memory, what a process takes for the runtime and its programs, beside tensors.
RUNTIME_BYTES = 600 << 20


def choose_device(name: str) -> torch.device:
    """The device of a run: "auto" takes CUDA where there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", process_group().local_rank)
        if GPU.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            seen = f"torch {torch.__version__} sees none: the run computes on the CPU."
            fallbacks.note("device", f"This machine has a GPU ({GPU}), but {seen}")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device = {name!r} is no device: {error}.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device = {name!r}: runs work on 'cpu' and 'cuda' only.")
    present = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "cuda" and not present:
        raise ConfigError(f"engine.device = {name!r}, but torch sees no CUDA device. Use 'cpu'.")
    if (device.index or 0) >= present:
        raise ConfigError(
            f"engine.device = {name!r}, but the last one is '{device.type}:{present - 1}'."
        )
    return device


def choose_mode(
    engine: EngineSettings, device: torch.device, elements: int, images: int
) -> ComputeMode:
    """How to compute on a device, where the settings leave it open.

    ``elements`` per image that the layers hand on, and ``images`` to be trained on in all.
    """
    cuda = device.type == "cuda"
    if engine.graphs and not cuda:
        raise ConfigError(
            f"engine.graphs = true needs a CUDA device, but the run is on {device}. Leave it out."
        )
    half = cuda and torch.cuda.is_bf16_supported()
    compile = engine.compile
    if compile is None:
        compile = cuda and compiling_pays(elements, images)
    if compile and cuda and not compiler_is_safe():
        if engine.compile:
            raise ConfigError(
                f"engine.compile = true, but the compiler of torch {torch.__version__} can write "
                "kernels that read what they have not written yet. Use torch 2.14 or later, or "
                "leave it out."
            )
        lacking = f"the compiler of torch {torch.__version__} lacks a barrier"
        fallbacks.note("compile", f"Nothing is compiled: {lacking}. Torch 2.14 or later has it.")
        compile = False
    return ComputeMode(
        half=half if engine.precision == "auto" else engine.precision == "bfloat16",
        graphs=cuda if engine.graphs is None else engine.graphs,
        compile=compile,
        share=(cuda and engine.gpu_share) or 1.0,
    )


def with_threads(settings: Settings, crowd: Crowd = ALONE) -> Settings:
    """The same settings with the number of CPU threads written down: the bits depend on it.

    Where the settings leave it open, runs at once share the threads of one, and those on one GPU
    plan with equal parts of its memory: what a neighbour takes must not decide on stacks.
    """
    threads = settings.engine.threads or max(1, torch.get_num_threads() // crowd.size)
    part = settings.engine.gpu_share or (1 / crowd.neighbours if crowd.neighbours > 1 else None)
    return replace(settings, engine=replace(settings.engine, threads=threads, gpu_share=part))


def keep_to_share(device: torch.device, share: float) -> None:
    """Bound what this process takes of a GPU's memory: it is to run out of it, not a neighbour.

    A whole GPU is not bounded; the runtime's own part is no tensor's, and is left free.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        part = max(share / 2, share - RUNTIME_BYTES / total) if share < 1 else 1.0
        # torch refuses a device without a number here; none means the current one.
        torch.cuda.set_per_process_memory_fraction(part, device.index)


def switch_torch(engine: EngineSettings) -> None:
    """Set what torch keeps for the whole process: threads, precision, determinism."""
    if engine.threads is not None:
        torch.set_num_threads(engine.threads)
    torch.set_float32_matmul_precision("high" if engine.tf32 else "highest")
    if engine.deterministic:
        # Read when the first product is computed on a GPU; without it products may not repeat.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    if engine.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(engine.deterministic)  # loads the compiler
