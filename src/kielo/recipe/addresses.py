"""Addresses of files on other machines: https://, s3://, hf:// and the other file systems of fsspec."""

import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PERSON = re.compile(r"://[^/]*@")
_SECRET = re.compile(
    r"[?&;][^=&;]*(sig|token|secret|pass|pwd|auth(?!or)|credential|key)[^=&;]*=", re.IGNORECASE
)


def is_address(path: str | None) -> bool:
    return bool(path and _ADDRESS.match(path))


def scheme_of(address: str) -> str:
    return address.partition("://")[0].lower()


def address_problem(address: str) -> str | None:
    """Return why an address cannot be in a recipe, with the fix, or None.

    Recipes, manifests and logs store addresses, so none of them can contain a secret.
    """
    if _PERSON.search(address):
        return "has a name or password in it, which would be stored. Fix: ~/.netrc, or the environment"
    if _SECRET.search(address):
        return (
            "has a key or signature in it, which would be stored. Fix: an address without it, with the keys "
            "in the environment, or a file that you downloaded"
        )
    return None
