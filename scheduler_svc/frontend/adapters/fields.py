"""Errors that name fields, told in the words of the interface that the request came by.

Knows nothing of what the fields mean: it replaces names in the path and in the message of a RequestError.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

from scheduler_svc.errors import InvalidArgument, RequestError, Unimplemented


class FieldNames:
    """`names`: our path or the beginning of one ("stopping.stop", "sampling") -> theirs. The longest one counts."""

    def __init__(self, names: Mapping[str, str]):
        self._names = dict(names)
        ours = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w.])(?:{ours})(?![\w])")

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            if not error.field:
                raise
            message, field = self._theirs(error.message), self._theirs(error.field)
            raise type(error)(message, field=field, retry_after_s=error.retry_after_s) from None

    def _theirs(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._names[match.group()], text)


def unsupported(field: str) -> Unimplemented:
    return Unimplemented(f"{field} is not supported by this server; leave it unset", field=field)


def not_negative(field: str, value: int) -> int:
    """For signed fields that mean a count or an id."""
    if value < 0:
        raise InvalidArgument(f"{field} is {value}, but must be 0 or more", field=field)
    return value
