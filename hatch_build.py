"""Builds the draws in C (``core/draw.c``) into the wheel, where there is a compiler.

Without one, or with SKETCHPROP_PURE=1, the wheel is pure Python and draws are made in torch.
"""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ["-O3", "-std=c99", "-ffp-contract=off", "-fPIC", "-shared"]


class NativeDraws(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        core = Path(self.root, "src", "sketchprop", "core")
        library = core / "_draw.so"
        library.unlink(missing_ok=True)
        if os.environ.get("SKETCHPROP_PURE") or os.name == "nt":
            return
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [*compiler, *FLAGS, str(core / "draw.c"), "-o", str(library), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            self.app.display_warning(f"draws stay in torch: {shlex.join(command)}: {reason}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append("src/sketchprop/core/_draw.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
