"""The tools of the demo as OpenAI function schemas: `TOOLS` for everybody, `HELPDESK_TOOLS` for one tenant."""

from typing import Any

Schema = dict[str, Any]

JSON_TYPE_BY_ARGUMENT = {"value": "number"}  # every other argument is a string


def function_schema(name: str, description: str, *arguments: str) -> Schema:
    """One function schema; all arguments are required, and their order is the order of a canonical call."""
    properties = {argument: {"type": JSON_TYPE_BY_ARGUMENT.get(argument, "string")} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def by_name(*schemas: Schema) -> dict[str, Schema]:
    return {schema["function"]["name"]: schema for schema in schemas}


TOOLS: dict[str, Schema] = by_name(
    function_schema("get_weather", "Weather in a city on a day.", "city", "day"),
    function_schema("get_time", "Local time in a city.", "city"),
    function_schema("calculate", "Work out a sum.", "expression"),
    function_schema("get_order", "Look up an order.", "order_id"),
    function_schema("create_event", "Add a calendar event.", "title", "day", "time"),
    function_schema("list_events", "Calendar events of a day.", "day"),
    function_schema("convert_units", "Convert a quantity.", "value", "from_unit", "to_unit"),
    function_schema("find_contact", "Phone number of a person.", "name"),
)

HELPDESK_TOOLS: dict[str, Schema] = by_name(
    function_schema("open_ticket", "Open a support ticket.", "title", "priority"),
    function_schema("ticket_status", "Status of a ticket.", "ticket_id"),
    function_schema("assign_ticket", "Give a ticket to an agent.", "ticket_id", "agent"),
    function_schema("close_ticket", "Close a ticket.", "ticket_id"),
    function_schema("escalate_ticket", "Raise a ticket to a team.", "ticket_id", "team"),
    function_schema("search_articles", "Search the help articles.", "query"),
)
