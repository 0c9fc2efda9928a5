"""The OpenAPI description as an HTML page at /docs. The pages that FastAPI offers load scripts from the network."""

from __future__ import annotations

import html
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.2rem 0 0.2rem; font-size: 1.05rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
b { display: inline-block; min-width: 3.2rem; }
table { border-collapse: collapse; margin: 0.4rem 0; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 1rem 0.15rem 0; border-top: 1px solid #8885; }
p { margin: 0.2rem 0; max-width: 45rem; }
"""


def docs_page(description: dict[str, Any]) -> str:
    """The HTML of an OpenAPI description. It refers to /docs.css, which is `STYLE`."""
    info = description["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_(info['title'])}</title><link rel=stylesheet href=/docs.css>",
        f"<h1>{_(info['title'])}</h1><p>{_(info.get('description', ''))}</p>",
        "<p>Machine-readable: <a href=/openapi.json>openapi.json</a>.</p>",
    ]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(_operation(path, method, operation))
    parts.append("<h1>Types</h1>")
    for name, schema in sorted(description.get("components", {}).get("schemas", {}).items()):
        parts.append(f"<h2 id='{_(name)}'>{_(name)}</h2><p>{_(schema.get('description', ''))}</p>{_fields(schema)}")
    return "".join(parts) + "</html>"


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"<h2><b>{_(method.upper())}</b> <code>{_(path)}</code></h2>"]
    parts.append(f"<p>{_(operation.get('description', operation.get('summary', '')))}</p>")
    rows = [
        (f"{x['name']} ({x['in']})", x.get("schema", {}), x.get("description", ""))
        for x in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {})
    rows += [(f"body: {kind}", x.get("schema", {}), "") for kind, x in body.items()]
    for status, answer in operation.get("responses", {}).items():
        if not status.startswith("2"):
            continue  # errors all have the same type
        contents = answer.get("content") or {"": {}}
        rows += [(f"{status} {kind}", x.get("schema", {}), _answer_description(answer)) for kind, x in contents.items()]
    return "".join(parts) + _table(rows)


def _answer_description(answer: dict[str, Any]) -> str:
    description = str(answer.get("description", ""))
    return "" if description == "Successful Response" else description  # FastAPI's default says nothing


def _fields(schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    return _table([
        (name if name in needed else f"{name} (optional)", one, one.get("description", ""))
        for name, one in schema.get("properties", {}).items()
    ])  # fmt: skip


def _table(rows: list[tuple[str, dict[str, Any], str]]) -> str:
    cells = (f"<tr><td><code>{_(a)}</code><td>{_type(b)}<td>{_(c)}" for a, b, c in rows)
    return f"<table>{''.join(cells)}</table>" if rows else ""


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema as a short type expression."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"<a href='#{_(name)}'>{_(name)}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(x) for x in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(f"<code>{_(str(x))}</code>" for x in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = {"minimum": "≥", "maximum": "≤", "minLength": "length ≥", "maxLength": "length ≤"}
    limits = [f"{word} {schema[name]}" for name, word in bounds.items() if name in schema]
    return _(", ".join([str(schema.get("format", schema.get("type", "anything"))), *limits]))


def _(text: str) -> str:
    return html.escape(text)
