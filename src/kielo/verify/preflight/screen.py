"""The verdict of a preflight as text on one screen: the checks, the nodes, and what is wrong. Torch-free."""

from kielo.artifact.verify_results import Complaint, Preflight

CHECK_TITLES = ("check", "found", "seconds", "")
_MOST_COMPLAINTS, _MOST_NODES = 20, 8


def check_rows(found: Preflight) -> list[list[str]]:
    """Returns the rows below CHECK_TITLES."""
    rows = []
    for check in found.checks:
        of_check = [complaint for complaint in found.complaints if complaint.check == check.name]
        refusals = sum(complaint.is_refusal for complaint in of_check)
        said = "REFUSED" if refusals else "warning" if of_check else "ok" if check.found else ""
        rows.append([check.name, check.summary, f"{check.seconds:.1f}", said])
    return rows


def verdict_lines(found: Preflight) -> list[str]:
    """Returns every complaint, at most twenty, the nodes that passed, and those that did not, by name."""
    lines = [_line(complaint) for complaint in found.complaints[:_MOST_COMPLAINTS]]
    if len(found.complaints) > _MOST_COMPLAINTS:
        lines.append(f"and {len(found.complaints) - _MOST_COMPLAINTS} more in {found.FILE_NAME}")
    good = [node.name for node in found.nodes if node.passed]
    if good:
        lines.append(f"{_nodes(len(good))} passed: {_named(good)}")
    if found.bad_nodes:
        lines.append(f"{_nodes(len(found.bad_nodes))} REFUSED: {_named(found.bad_nodes)}")
    if len(found.bad_nodes) == len(found.nodes) > 1:
        lines.append("no node passed: look for a cause that they share before nodes are left out")
    of_job = [complaint for complaint in found.complaints if complaint.is_refusal and complaint.node is None]
    if of_job:
        lines.append("the job is REFUSED for what no node is to blame for")
    if found.passed:
        lines.append(f"all is well: {found.ranks} ranks in {found.seconds:.1f} s")
    return lines


def _line(complaint: Complaint) -> str:
    where = "the job" if complaint.rank is None else f"{complaint.node}: rank {complaint.rank}"
    kind = complaint.check if complaint.is_refusal else f"{complaint.check} (warning)"
    return f"{where}: {kind}: {complaint.message}"


def _nodes(count: int) -> str:
    return f"{count} node" + "s" * (count > 1)


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NODES
    return ", ".join(names[:_MOST_NODES]) + (f" and {more} more" if more > 0 else "")
