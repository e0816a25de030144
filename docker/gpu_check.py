"""Is there a GPU in this container that computes? One line says which, or what is wrong and what to do."""

from __future__ import annotations

import glob
import sys
import warnings

CPU_INSTEAD = "or set GRADIEND_DIST_CPU_OK=1 to go on without a GPU"
# NVIDIA's driver on Linux, and the one that Windows lends to its Linux.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")


class NoGpu(Exception):
    """One sentence: what is wrong, and what to do."""


def require_device_files(patterns: tuple[str, ...] = DEVICE_FILES) -> None:
    """Told before torch is imported, which takes seconds."""
    if not any(glob.glob(pattern) for pattern in patterns):
        raise NoGpu(
            "this image is for NVIDIA GPUs and the container sees none: start it with --gpus all (Docker; needs the "
            f"NVIDIA Container Toolkit) or --nv (Apptainer), {CPU_INSTEAD}."
        )


def usable_gpus() -> list[str]:
    """The names of all GPUs, each of which has computed something."""
    import torch

    try:
        torch.cuda.init()
        return [_computing(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        raise NoGpu(_explain(str(error), torch.version.cuda)) from None


def _computing(index: int) -> str:
    import torch

    name = torch.cuda.get_device_name(index)
    try:
        total = torch.ones(1024, device=f"cuda:{index}").sum().item()
    except RuntimeError as error:
        raise RuntimeError(f"GPU {index} ({name}) does not compute: {error}") from None
    if total != 1024:
        raise RuntimeError(f"GPU {index} ({name}) computes 1024 ones as {total}")
    return name


def _explain(error: str, cuda: str | None) -> str:
    """torch's reason is its first sentence; the rest of it advises those who are not in a container."""
    reason = error.strip().splitlines()[0].split(". ")[0].rstrip(".")
    if cuda is None:
        return (
            f"torch in this image was built without CUDA ({reason}): build the image again with a CUDA build of torch."
        )
    if "too old" in error:
        return (
            f"the driver of this machine is too old for CUDA {cuda} ({reason}): update it, build the image with an "
            f"older CUDA_VERSION, {CPU_INSTEAD}."
        )
    return (
        f"no GPU is usable in this image for CUDA {cuda} ({reason}): see what nvidia-smi says on the host, "
        f"{CPU_INSTEAD}."
    )


def main() -> int:
    """Say which GPUs there are, or the one sentence, and return the exit code."""
    warnings.simplefilter("ignore")  # torch warns about what is told here
    try:
        require_device_files()
        names = usable_gpus()
    except NoGpu as problem:
        sys.stderr.write(f"gradiend_dist image: error: {problem}\n")
        return 2
    sys.stderr.write(f"gradiend_dist image: {len(names)} GPU(s): {', '.join(names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
