"""``ckpttool schema``."""

from __future__ import annotations

import sys
from typing import Annotated

from ckpttool.core.options import Argument


def _names() -> list[str]:
    from ckpttool.schemas import OBJECTS

    return [*OBJECTS]


def command(
    name: Annotated[
        str | None, Argument("[NAME]", "The object; without it their names are listed.", _names)
    ] = None,
) -> None:
    """The JSON Schema of an object that the commands write.

    JSON Schema 2020-12. Members may be added to an object, and are never renamed or removed under
    the same version.

    \b
    Examples:
      ckpttool schema
      ckpttool schema diff
    """
    from ckpttool.report.renderers import json
    from ckpttool.schemas import OBJECTS, schema

    if name is None:
        sys.stdout.writelines(f"{name}  {kind.title}\n" for name, kind in OBJECTS.items())
    else:
        sys.stdout.write(json.render(schema(name)))
