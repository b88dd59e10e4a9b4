"""Text that is nearly periodic and yet no junk: installed code, licences and documents, and generated tables and lists.

Left out by rule: test suites and their data (`test`, `tests`, `idle_test`), since they hold what a loop looks like on purpose
(test_reprlib, test_quopri, random-bool-data.txt). Left out by name, with the reason, below.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TEST_FOLDERS = {"test", "tests", "idle_test", "__pycache__"}
LOOPS_BY_NAME = {
    "iso8859_6.py",  # a table with up to 45 lines "'\\ufffe'" in a row, nothing new in any
    "iso8859_8.py",  # likewise
}
HARDEST = (
    "_pydecimal.py",  # doctests of truth tables
    "random.py",  # calls that differ in one number
    "email/charset.py",  # 16 lines that differ in two tokens
    "ipaddress.py",  # zeros of ip6.arpa
    "dataclasses.py",  # a decision table
    "_compat_pickle.py",
    "mimetypes.py",
    "locale.py",
    "ftplib.py",
    "colorsys.py",
    "dis.py",
    "encodings/cp437.py",  # character tables
    "encodings/mac_greek.py",
    "encodings/rot_13.py",
    "curses/has_key.py",
)


def installed_files() -> list[Path]:
    """The standard library's code, and the licences and documents of installed packages, in a fixed order."""
    library, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    code = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    documents = [path for name in ("LICENSE*", "*.md", "*.rst", "*.txt", "*.html") for path in packages.rglob(name)]
    chosen = {path for path in [*code, *documents] if path.is_file() and not TEST_FOLDERS & set(path.parts)}
    return sorted(path for path in chosen if path.name not in LOOPS_BY_NAME)


def hardest_files() -> list[Path]:
    """Those that came nearest to a finding when the rules were measured."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [library / name for name in HARDEST]


def read(path: Path) -> str:
    """The file's text; bytes that are no UTF-8 become U+FFFD."""
    return path.read_text(encoding="utf-8", errors="replace")


def tables_and_lists() -> Iterator[str]:
    """Generated ones, each a text of its own."""
    numbers = range(1, 61)
    yield "\n".join(f"| {n} | {n * n} | {n**3} | {n % 7} |" for n in numbers)
    yield "\n".join(f"| {'open' if n % 3 else 'closed'} | {n * 37 % 101:>6} | item {n} |" for n in numbers)
    yield "\n".join(",".join(str(n * k * 7919 % 1000) for k in range(1, 9)) for n in numbers)
    yield "name,age,city\n" + "\n".join(f"user{n},{20 + n % 50},town{n * 31 % 17}" for n in numbers)
    yield json.dumps(
        [{"id": n, "name": f"item {n}", "price": n * 3.5, "in_stock": n % 3 > 0} for n in numbers], indent=2
    )
    yield json.dumps([n * 2654435761 % 997 for n in range(300)])
    yield json.dumps(list(range(300)))
    yield "\n".join(f"{n}. {word}" for n, word in enumerate(dir(str) + dir(int), 1))
    yield "\n".join(" ".join(f"{n * k:4}" for k in range(1, 13)) for n in range(1, 13))
    yield "\n".join(f"{n} x {k} = {n * k}" for n in range(1, 11) for k in range(1, 11))
    yield "\n".join(f"<tr><td>{n}</td><td>{n * 17 % 59}</td><td>{chr(97 + n % 26) * 3}</td></tr>" for n in numbers)
    yield "from os import (\n" + "".join(f"    {name},\n" for name in dir(sysconfig)) + ")\n"
    yield "\n".join(f"import {name}" for name in sorted(dir(json) + dir(sysconfig)))
    yield "\n\n".join(f"Section {n}\n{mark * 78}" for n, mark in enumerate("-=*#~+" * 8))
    yield "\n".join("+" + "-" * 30 + "+" if n % 4 == 0 else f"| row {n:<25}|" for n in numbers)
    yield "\n".join(f"| {n >> 3 & 1} | {n >> 2 & 1} | {n >> 1 & 1} | {n & 1} | {n % 3 == 0} |" for n in range(16))
    yield "\n".join(f"{' ' * (n % 40)}{n * n}" for n in numbers)
