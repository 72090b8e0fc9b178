"""Messages of the daemon as plain dicts: every field by its name, numbers as numbers, bytes as hex."""

from typing import Any

from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """All fields, also those that are zero; repeated ones as lists, messages as dicts, None for one that is not set."""
    return {
        field.name: None
        if field.message_type is not None and not field.is_repeated and not message.HasField(field.name)
        else _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


def _value(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_one(item) for item in value]
    return _one(value)


def _one(value: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    return value.hex() if isinstance(value, bytes) else value
