"""`hf-longmoe doctor`: what a run will find on this machine, and what would go wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from hf_longmoe.commands import machine
from hf_longmoe.sizes import format_bytes

__all__ = ["add_arguments", "findings", "run"]

_IMPORTED = ("torch", "transformers", "accelerate")  # the integrations do not load without the right ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if something would go wrong, else 0."""
    facts = {
        "packages": machine.packages(),
        "accelerators": machine.devices(),
        "host": machine.host(),
        "threads": machine.threads(),
        "environment": machine.environment(),
    }
    wrong, notes = findings(facts)
    if arguments.json:
        values = {"format": "hf-longmoe doctor", "version": 1, **facts, "problems": wrong, "notes": notes}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(_lines(facts)))
        for heading, texts in (("Would go wrong", wrong or ["nothing"]), ("Good to know", notes)):
            if texts:
                print(f"\n{heading}", *(f"  - {text}" for text in texts), sep="\n")
    return 1 if wrong else 0


# -- what it means ---------------------------------------------------------------------------------------------------
def findings(facts: dict[str, Any]) -> tuple[list[str], list[str]]:
    """
    Arguments:
        facts (`dict`): of each function of `machine` that `run` calls, what it returned.

    Returns:
        What would go wrong, and what is only good to know; a sentence each.
    """
    wrong: list[str] = []
    notes: list[str] = []
    for check in (_packages, _accelerators, _host, _threads, _environment):
        check(facts, wrong, notes)
    return wrong, notes


def _packages(facts: dict[str, Any], wrong: list[str], notes: list[str]) -> None:
    hosts, extras = facts["packages"]["hosts"], facts["packages"]["extras"]
    found = {**hosts, **{extra["package"]: extra for extra in extras.values()}}
    for name, package in found.items():
        need = f"{name}{package['needs'] or ''}"
        if package["fits"] is False:
            then = "the integrations refuse it" if name in _IMPORTED else "it may fail"
            wrong.append(f'{name} {package["installed"]}: {need} is needed, {then}. pip install "{need}"')
        elif package["installed"] is None and name in _IMPORTED:
            wrong.append(f'{name} is not installed: the integrations do not load. pip install "{need}"')
    if all(package["needs"] is None for package in hosts.values()):
        notes.append("hf_longmoe has no metadata here (it runs from a folder), so no version is checked.")


def _accelerators(facts: dict[str, Any], wrong: list[str], notes: list[str]) -> None:
    found = facts["accelerators"]
    if found["error"] is not None:
        if facts["packages"]["hosts"]["torch"]["installed"] is not None:
            wrong.append(f"torch, or what hf_longmoe needs beside it, cannot be imported: {found['error']}")
        return
    if found["kind"] is None:
        if found["driver"] is not None:
            why = (
                f"torch is built for {found['built_for']}: the driver may be too old, or CUDA_VISIBLE_DEVICES hides it"
                if found["built_for"]
                else "this torch is a build for CPU"
            )
            wrong.append(f"An {found['driver']} GPU is there, and torch does not see it; {why}.")
        notes.append("No accelerator: boundaries stay where they are, and the optimizer updates in place.")
    elif not any(device["own_memory"] for device in found["devices"]):
        notes.append(f"{found['kind']} uses the host's memory: there is nothing to offload to.")
    for index, device in enumerate(found["devices"]):
        free, total = device["free_bytes"], device["total_bytes"]
        if total and free < 0.9 * total:
            sizes = f"{format_bytes(free)} of {format_bytes(total)}"
            notes.append(f"{found['kind']}:{index} has {sizes} free: others hold the rest.")
    if found["peers"] in ("none", "some"):
        notes.append(f"Peer access between devices: {found['peers']}. What travels there goes through the host.")


def _host(facts: dict[str, Any], wrong: list[str], notes: list[str]) -> None:
    host = facts["host"]
    available, limit, lockable = host["available_bytes"], host["control_group_bytes"], host["lockable_bytes"]
    if limit is not None and available is not None and limit < available:
        wrong.append(
            f"The control group allows {format_bytes(limit)} of host memory, and {format_bytes(available)} are counted"
            " as free: a run that takes more than its limit is killed without an error."
        )
    if isinstance(lockable, int):
        text = (
            f"ulimit -l is {format_bytes(lockable)}: host memory cannot be pinned beyond that where the driver"
            " keeps to it; copies are then slower and the host waits for them. Raise it (ulimit -l unlimited)"
        )
        offloads = any(device["own_memory"] for device in facts["accelerators"]["devices"])
        (wrong if offloads else notes).append(text + ("." if offloads else "; here nothing is pinned."))
    budget = facts["environment"]["caps"].get("boundaries", {}).get("host_budget")
    if budget is not None and available is not None and budget > available:
        wrong.append(
            f"LONGMOE_BOUNDARIES_HOST_BUDGET is {format_bytes(budget)} a rank, and {format_bytes(available)} of host"
            " memory are free."
        )


def _threads(facts: dict[str, Any], wrong: list[str], notes: list[str]) -> None:
    found = facts["threads"]
    cores, quota, omp, updates = found["cores"], found["quota"], found["omp_num_threads"], found["update_threads"]
    if omp is not None:
        first = omp.split(",")[0].strip()
        number = int(first) if first.isdecimal() else 0
        update_on = facts["environment"]["caps"].get("optimizer", {}).get("update_on", "auto")
        if number < 1:
            wrong.append(f"OMP_NUM_THREADS={omp} is not a number of threads: it is ignored, and every rank takes all.")
        elif number > cores:
            wrong.append(f"OMP_NUM_THREADS={omp} on {cores} cores: threads wait for each other.")
        elif updates is not None and number < updates and update_on != "accelerator":
            notes.append(
                f"OMP_NUM_THREADS={omp} with update_on={update_on}: the optimizer raises it to {updates} during its"
                f" step on the host, and the rest of the work there keeps {number}."
            )
    if quota is not None and updates is not None and quota < updates:
        wrong.append(
            f"The control group has {quota:.3g} cores' worth of time, and an update on the host starts {updates}"
            f" threads: they are stopped in turns. Start the run on {max(1, int(quota))} cores (taskset)."
        )


def _environment(facts: dict[str, Any], wrong: list[str], notes: list[str]) -> None:
    for name, near in facts["environment"]["unknown"].items():
        wrong.append(f"{name} is read by nothing." + (f" Did you mean {near}?" if near else ""))
    wrong.extend(f"The environment sets {error}" for error in facts["environment"]["refused"])


# -- for people ------------------------------------------------------------------------------------------------------
def _lines(facts: dict[str, Any]) -> Iterator[str]:
    packages, found, host = facts["packages"], facts["accelerators"], facts["host"]
    yield f"hf-longmoe {packages['hf_longmoe']}, Python {packages['python']}"
    yield "\nPackages"
    for name, package in packages["hosts"].items():
        state = {True: "", False: "  WRONG VERSION", None: ""}[package["fits"]]
        needs = f"needs {package['needs']}" if package["needs"] else ""
        yield f"  {name:<20}{package['installed'] or 'not installed':<18}{needs}{state}".rstrip()
    for extra, package in packages["extras"].items():
        missing = f"not installed     pip install 'hf-longmoe[{extra}]'"
        yield f"  {package['package']:<20}{package['installed'] or missing}"
    yield "\nDevices"
    for index, device in enumerate(found["devices"]):
        free = _free(device["free_bytes"], device["total_bytes"])
        own = "memory of its own" if device["own_memory"] else "the host's memory"
        name = f"{found['kind']}:{index}"
        yield f"  {name:<20}{device['name'] or 'name not known'}, {free}, {own}"
        yield f"  {'':<20}link to the host: {device['host_link'] or 'not known'}"
    if not found["devices"]:
        yield "  none" if found["error"] is None else "  not known"
    if len(found["devices"]) > 1:
        yield f"  {'between devices':<20}peer access: {found['peers'] or 'not known'}; NVLink: not known"
    yield "\nHost"
    yield f"  {'memory':<20}{_free(host['available_bytes'], host['total_bytes'])}"
    limit = host["control_group_bytes"]
    yield f"  {'control group':<20}{'no limit on memory' if limit is None else f'at most {format_bytes(limit)}'}"
    lockable = host["lockable_bytes"]
    told = format_bytes(lockable) if isinstance(lockable, int) else lockable or "not known"
    yield f"  {'ulimit -l':<20}{told}"
    threads = facts["threads"]
    quota = "" if threads["quota"] is None else f", time of {threads['quota']:.3g}"
    yield f"  {'cores':<20}{threads['cores']}{quota}"
    yield f"  {'OMP_NUM_THREADS':<20}{threads['omp_num_threads'] or 'not set'}"
    if facts["environment"]["set"]:
        yield "\nEnvironment"
        yield from (f"  {name}={value}" for name, value in facts["environment"]["set"].items())


def _free(free: int | None, total: int | None) -> str:
    return "not known" if free is None or total is None else f"{format_bytes(free)} of {format_bytes(total)} free"
