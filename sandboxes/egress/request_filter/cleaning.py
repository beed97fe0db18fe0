"""Application of a shape to a value of a request.

Rules for what no table knows:

1. An unknown key whose value is a number, a boolean, null, or a string that is neither URL nor id is dropped and counted. CLIs
   of the vendors add such keys with each release.
2. Any other unknown key, unknown type or value of another shape is an error."""

from dataclasses import dataclass, field
from typing import Any

from sandboxes.egress.request_filter.errors import INVALID_REQUEST, TOOL_NOT_ALLOWED, URLS_NOT_FETCHED, InvalidRequest
from sandboxes.egress.request_filter.shapes import Constant, Either, Leaf, ListOf, Record, RequestShape, Shape, Tagged, TokenMap
from sandboxes.egress.request_filter.values import has_reference, is_inline_data, is_reference, is_url

MAX_NESTING_DEPTH = 128  # of schemas and arguments; the tables limit everything else
MAX_DROPPED_NAMES = 20  # of a request; further ones are only counted
MAX_SHOWN_CHARACTERS = 100  # of a name or type in a message
Place = tuple[Any, str | int] | None  # place of the parent, and name or index within the parent
ABSENT_VALUES: tuple[Any, ...] = (None, [])
NEVER_FORWARDED = (Leaf.IGNORED, Leaf.REFUSED, Leaf.PROVIDER_TOOL)
DROPPED = object()


@dataclass
class Cleaner:
    """Builds the forwarded copy of a request, and counts the dropped fields."""

    dropped_count: int = 0
    dropped_names: set[str] = field(default_factory=set)

    def clean_request(self, body: dict[str, Any], shape: RequestShape) -> dict[str, Any]:
        """Return the known fields of a body. Raise InvalidRequest."""
        result: dict[str, Any] = {}
        for name, value in body.items():
            rule = shape.fields.get(name)
            if rule is None:
                self._drop((None, name))
            else:
                self._clean_into(result, name, value, rule, (None, name))
        return result

    def clean(self, value: Any, shape: Shape, place: Place) -> Any:
        """Return the forwarded copy of a value. Raise InvalidRequest."""
        match shape:
            case Leaf():
                return _check_leaf(value, shape, place)
            case Constant():
                if value != shape.value:
                    raise _build_shape_error(place, f"must be {shape.value!r}")
                return value
            case ListOf():
                return self._clean_list(value, shape.items, place)
            case TokenMap():
                if not isinstance(value, dict) or not all(name.isdecimal() for name in value):
                    raise _build_unsupported_error(value, "must be an object with token numbers as keys", place)
                return {name: self.clean(child, shape.values, (place, name)) for name, child in value.items()}
            case Either():
                return self._clean_either(value, shape, place)
            case Tagged():
                return self._clean_tagged(value, shape, place)
            case Record():
                return self._clean_record(value, shape, place, shape.error_code)

    def _clean_into(self, result: dict[str, Any], name: str, value: Any, rule: Shape, place: Place) -> None:
        if value is None and rule in NEVER_FORWARDED:
            return
        cleaned = None if value is None else self.clean(value, rule, place)
        if cleaned is not DROPPED:
            result[name] = cleaned

    def _clean_list(self, value: Any, items: Shape, place: Place) -> list[Any]:
        if not isinstance(value, list):
            raise _build_shape_error(place, "must be a list")
        return [self.clean(item, items, (place, number)) for number, item in enumerate(value)]

    def _clean_either(self, value: Any, shape: Either, place: Place) -> Any:
        if isinstance(value, str) and shape.string is not None:
            return _check_leaf(value, shape.string, place)
        if isinstance(value, int | float) and shape.number is not None:
            return _check_leaf(value, shape.number, place)
        if isinstance(value, list) and shape.items is not None:
            return self._clean_list(value, shape.items, place)
        if isinstance(value, dict) and shape.object is not None:
            return self.clean(value, shape.object, place)
        raise _build_shape_error(place, "has a JSON type that is not supported here")

    def _clean_tagged(self, value: Any, shape: Tagged, place: Place) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _build_shape_error(place, "must be an object")
        kind = value.get("type")
        found = shape.untyped if kind is None else shape.find(kind) if isinstance(kind, str) else None
        if found is None:
            raise _build_type_error(kind, value, shape.error_code, place)
        return self._clean_record(value, found, place, shape.error_code, is_tagged=True)

    def _clean_record(
        self, value: Any, shape: Record, place: Place, error_code: str, *, is_tagged: bool = False
    ) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _build_shape_error(place, "must be an object")
        result: dict[str, Any] = {}
        for name, child in value.items():
            rule, at = shape.fields.get(name), (place, name)
            if is_tagged and name == "type":
                result[name] = child
            elif rule is None:
                self._drop_unknown(name, child, error_code, at)
            else:
                self._clean_into(result, name, child, rule, at)
        missing = [name for name in sorted(shape.required) if result.get(name) is None]
        if missing:
            raise InvalidRequest(error_code, f"{_format_place(place)}: the field {missing[0]} is missing.")
        return result

    def _drop_unknown(self, name: str, value: Any, error_code: str, place: Place) -> None:
        if has_reference(name, value):
            raise _build_reference_error(place)
        if isinstance(value, dict | list):
            if error_code == TOOL_NOT_ALLOWED:
                raise InvalidRequest(error_code, f"{_format_place(place)}: tools with this field are not allowed.")
            raise InvalidRequest(error_code, f"{_format_place(place)}: this field is not supported.")
        if value is not None:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self.dropped_count += 1
        if len(self.dropped_names) < MAX_DROPPED_NAMES:
            self.dropped_names.add(_format_place(place, with_indexes=False))


def _check_leaf(value: Any, leaf: Leaf, place: Place) -> Any:
    is_string = isinstance(value, str)
    match leaf:
        case Leaf.IGNORED:
            return DROPPED
        case Leaf.JSON:
            _check_depth(value, place)
        case Leaf.TEXT if not is_string:
            raise _build_shape_error(place, "must be a string")
        case Leaf.INPUT if not is_string:
            raise _build_shape_error(place, "must be a string")
        case Leaf.INPUT if is_reference(value):
            raise _build_reference_error(place)
        case Leaf.NUMBER if not isinstance(value, int | float):
            raise _build_shape_error(place, "must be a number")
        case Leaf.VALUE if isinstance(value, dict | list):
            raise _build_unsupported_error(value, "must be a string, a number or a boolean", place)
        case Leaf.VALUE if is_string and is_url(value):
            raise _build_reference_error(place)
        case Leaf.DATA if not is_string:
            raise _build_unsupported_error(value, "must be a string with base64", place)
        case Leaf.DATA if not is_inline_data(value):
            raise _build_reference_error(place)
        case Leaf.EMPTY | Leaf.REFUSED if value not in ABSENT_VALUES:
            raise _build_reference_error(place)
        case Leaf.PROVIDER_TOOL if value not in ABSENT_VALUES:
            raise InvalidRequest(TOOL_NOT_ALLOWED, f"{_format_place(place)}: {PROVIDER_TOOL_MESSAGE}.")
        case Leaf.REFUSED | Leaf.PROVIDER_TOOL:
            return DROPPED
    return value


PROVIDER_TOOL_MESSAGE = "Tools executed by the provider are not allowed from a sandbox"


def _check_depth(value: Any, place: Place) -> None:
    pending = [(value, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING_DEPTH:
            raise _build_shape_error(place, f"is nested more than {MAX_NESTING_DEPTH} levels deep")
        if isinstance(node, dict | list):
            children = node.values() if isinstance(node, dict) else node
            pending += [(child, depth + 1) for child in children if isinstance(child, dict | list)]


def _build_type_error(kind: Any, value: Any, error_code: str, place: Place) -> InvalidRequest:
    if error_code == TOOL_NOT_ALLOWED:
        shown = "without a type" if kind is None else str(kind)[:MAX_SHOWN_CHARACTERS]
        return InvalidRequest(error_code, f"{_format_place(place)}: {PROVIDER_TOOL_MESSAGE}: {shown}.")
    shown = str(kind)[:MAX_SHOWN_CHARACTERS]
    reason = "must have a type" if kind is None else f"has a type that is not supported from a sandbox: {shown}"
    return _build_unsupported_error(value, reason, place)


def _build_unsupported_error(value: Any, reason: str, place: Place) -> InvalidRequest:
    """Build the error of a value that has no known shape. URLs and ids in the value are the more important reason."""
    return _build_reference_error(place) if has_reference(None, value) else _build_shape_error(place, reason)


def _build_shape_error(place: Place, reason: str) -> InvalidRequest:
    return InvalidRequest(INVALID_REQUEST, f"{_format_place(place)} {reason}.")


def _build_reference_error(place: Place) -> InvalidRequest:
    message = "URLs and ids of stored objects are not fetched for sandboxes. Send the content inline."
    return InvalidRequest(URLS_NOT_FETCHED, f"{_format_place(place)}: {message}")


def _format_place(place: Place, *, with_indexes: bool = True) -> str:
    parts: list[str] = []
    while place is not None:
        place, name = place
        if isinstance(name, str):
            parts.append(f".{name[:MAX_SHOWN_CHARACTERS]}")
        elif with_indexes:
            parts.append(f"[{name}]")
    return "".join(reversed(parts)).removeprefix(".")
