"""Where the project's data files (devices, shapes, data sets, task definitions) lie on this installation."""

from pathlib import Path

from qspec.errors import SourceError

_PACKAGE = Path(__file__).resolve().parent


def eval_dir() -> Path:
    """The `eval/` folder: inside an installed wheel (`qspec/_eval`), else the checkout's own."""
    for folder in (_PACKAGE / "_eval", _PACKAGE.parent / "eval"):
        if folder.is_dir():
            return folder
    raise SourceError(str(_PACKAGE), "has no eval/ data folder beside it", "reinstall qspec")
