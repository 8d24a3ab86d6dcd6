"""stub"""


def report_cost() -> dict[str, object]:
    return {}
