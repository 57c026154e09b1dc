"""Which HTTP status an error of memlens is: an unknown name 404, what is not there yet 409, any other request 422."""

from __future__ import annotations

from memlens.errors import IndexFolderError, ModelError, UnknownName

_STATUS = {UnknownName: 404, ModelError: 409, IndexFolderError: 409}


def status_of(error: Exception) -> int:
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 422)
