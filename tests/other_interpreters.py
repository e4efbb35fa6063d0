"""Virtual environments that see the packages of this one, made in a second; their own packages come first."""

import site
import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path) -> Path:
    """A virtual environment without packages; returns its folder."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)], check=True)
    return folder


def site_packages(folder: Path) -> Path:
    """Where a virtual environment has its packages, which are found before ours."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))


def see_our_packages(folder: Path) -> Path:
    """A venv created from a venv sees the packages of the base interpreter: add ours, with their .pth files.

    Returns its interpreter.
    """
    paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (site_packages(folder) / "ours.pth").write_text(lines)
    return folder / "bin" / "python"
