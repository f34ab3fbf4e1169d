"""Values of JSON schemas: every one is judged by another implementation."""

from __future__ import annotations

import random
from typing import Any

import jsonschema_rs
import pytest

from kvflash.errors import InvalidArgumentError
from kvflash.mocker.schema import VALUES_MAX, instance

NODE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["name", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "anything": {},
    "nested": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 3, "maxLength": 5},
            "days": {"type": "integer", "minimum": 1, "maximum": 3},
            "unit": {"enum": ["C", "F"]},
            "note": {"type": "string"},
            "at": {
                "type": "array",
                "items": {"type": "object", "properties": {"x": {}}, "required": ["x"]},
                "minItems": 2,
            },
        },
        "required": ["city", "days", "unit", "at"],
    },
    "a list that ends": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "the root again": {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}},
        "required": ["left"],
    },
    "parts": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 5}, "b": {"const": "x"}}, "required": ["b"]},
        ]
    },
    "choices of choices": {
        "anyOf": [{"type": "string"}, {"type": "integer"}],
        "allOf": [{"anyOf": [{"type": "integer"}, {"type": "null"}]}],
    },
    "contradictions are left out": {"oneOf": [{"type": "string", "enum": []}, {"type": "boolean"}]},
    "an enum of several types": {"type": "string", "enum": ["a", None, "b"]},
    "a number of an enum": {"type": ["integer", "null"], "enum": ["a", 1.5, 2.0, 3, True]},
    "a const beside an enum": {"enum": [1, 2], "allOf": [{"const": 2}]},
    "several types": {"type": ["null", "array"], "minItems": 1},
    "enough properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "minProperties": 3,
        "additionalProperties": {"type": "integer"},
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": {"type": "boolean"},
        "minItems": 3,
    },
    "distinct": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
    "below zero": {"type": "integer", "maximum": -7},
    "strictly": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 6},
    "between": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "tenths": {"type": "number", "multipleOf": 0.1, "minimum": 0.25, "maximum": 0.35},
    "dozens": {"type": "integer", "multipleOf": 12, "minimum": 100},
    "long": {"type": "string", "minLength": 500},
    "empty": {"type": "string", "maxLength": 0},
    "kinds are guessed": {"properties": {"a": {"minLength": 2}}, "required": ["a"]},
    **{
        name: {"type": "string", "format": name}
        for name in ("date", "date-time", "time", "email", "uuid", "uri", "ipv4", "ipv6")
    },
    **{
        pattern: {"type": "string", "pattern": pattern}
        for pattern in (
            r"^[A-Z]{3}-\d{4}$",
            r"^(a|bc)+x?$",
            r"^[^a-z\s]{2,}$",
            r"^\w+@\S+\.\w{2,3}$",
            r"^.[^x][а-я]{3}$",
            r"^[^\x00-\x7f]{2}$",
        )
    },
    "pattern and length": {"type": "string", "pattern": "^[a-f]+$", "minLength": 9, "maxLength": 9},
    "long by pattern": {"type": "string", "pattern": "^(ab?c)*-x$", "minLength": 300},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_values_are_valid(name: str) -> None:
    schema = SCHEMAS[name]
    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
    found = [instance(schema, random.Random(seed)) for seed in range(30)]
    for value in found:
        judge.validate(value)
    assert found == [instance(schema, random.Random(seed)) for seed in range(30)]


def test_values_differ_by_seed_and_have_required_properties_only() -> None:
    values = [instance(SCHEMAS["nested"], random.Random(seed)) for seed in range(20)]
    assert len({value["city"] for value in values}) > 10
    assert {value["unit"] for value in values} == {"C", "F"}
    assert all("note" not in value for value in values)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (False, "false allows nothing"),
        ([], "a schema must be an object"),
        ({"type": "text"}, "type must be one of JSON's, got 'text'"),
        ({"properties": []}, "properties must be an object"),
        ({"required": "a"}, "required a list"),
        ({"properties": {"a": 1}, "required": ["a"]}, "a schema must be an object, got 1"),
        ({"$ref": "https://example.com/s.json"}, r"\$ref must lead into the schema itself"),
        ({"$ref": "#/$defs/x"}, "leads to nothing"),
        ({"$ref": "#"}, "found no value"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "contradict"),
        ({"allOf": [{"minimum": "a"}, {"minimum": 1}]}, "malformed"),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "contradict"),
        ({"const": 1, "type": "string"}, "contradict"),
        ({"const": 1, "enum": [2]}, "contradict"),
        ({"enum": {}}, "enum must be a non-empty list"),
        ({"type": "string", "minLength": 10**9}, "minLength must be in 0..=65536, got 1000000000"),
        ({"type": "string", "maxLength": "1"}, "maxLength must be an integer"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "maxLength 1 is below"),
        ({"type": "string", "pattern": "("}, "is not valid"),
        ({"type": "string", "pattern": "^(?=a)b"}, "ASSERT is not supported"),
        ({"type": "string", "pattern": r"[^\s\S]"}, "empty class of characters"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "found no text of 2"),
        ({"type": "string", "pattern": "(a{9999}){9999}"}, "may take 200000 steps"),
        ({"type": "array", "minItems": VALUES_MAX}, f"more than {VALUES_MAX} values"),
        ({"type": "array", "minItems": -1}, "minItems must be in"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems 2 is above maxItems"),
        ({"required": ["a", "b"], "maxProperties": 1}, "2 properties are required"),
        ({"type": "string", "format": "email", "maxLength": 3}, "found no email of 0..=3"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "no number in"),
        ({"type": "integer", "minimum": "a"}, "minimum must be a number"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be above 0"),
        ({"type": "array", "items": {"enum": [1]}, "minItems": 2, "uniqueItems": True}, "distinct"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "deeper than 32",
        ),
    ],
)
def test_what_has_no_value_is_refused(schema: object, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        instance(schema, random.Random(1))


def test_schemas_of_every_branch_end() -> None:
    # Each level has two ways that both lead nowhere: all of them are more than anybody waits for.
    schema: Any = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
    schema = {"anyOf": [schema, dict(schema)]}
    with pytest.raises(InvalidArgumentError, match=f"more than {VALUES_MAX} values"):
        instance(schema, random.Random(1))
