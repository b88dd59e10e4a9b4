"""The prompt a user gives, on the command line or in a file: text, and not nothing."""

from __future__ import annotations

from pathlib import Path

from runtime.errors import StrawError


def read_prompt(path: Path) -> str:
    """The text of `path` without surrounding white space.

    Raises:
        StrawError: The file cannot be read, is not UTF-8 text, or is empty.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise StrawError(
            f"{path}: cannot be read ({error.strerror}), expected a text file; name another --prompt-file"
        ) from None
    except UnicodeDecodeError as error:
        raise StrawError(
            f"{path}: byte {error.start:,} is not UTF-8, expected a text file; name another --prompt-file"
        ) from None
    return checked_prompt(text, str(path))


def checked_prompt(text: str, source: str = "--prompt") -> str:
    """`text` without surrounding white space.

    Raises:
        StrawError: It is empty, or holds a NUL byte or bytes that were no UTF-8.
    """
    text = text.strip()
    broken = any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text)
    if not text or broken:
        found = "bytes that are not text" if text else "empty"
        raise StrawError(f"{source}: {found}, expected a prompt in words; give some")
    return text
