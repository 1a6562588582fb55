"""Hooks of the documentation site, named in ``mkdocs.yml``."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):(?=<code)")
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def on_page_content(html: str, **_: Any) -> str:
    """Return a page without the names of roles, which docstrings have and Markdown does not know."""
    return _ROLE.sub("", html)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Return a page as it is; one that would fetch something from elsewhere ends the build."""
    if found := _FETCHED.search(output):
        raise ValueError(f"{page.file.src_uri} must not fetch anything from elsewhere, got {found.group()}")
    return output
