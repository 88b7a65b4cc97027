"""The command line: one app, one command a study. It parses, calls a study, prints; no mathematics.

Exit status: 0 done, 1 a result outside its tolerance, 2 bad input (one line on stderr, no traceback).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app", "main"]

INTERRUPTED = 130

app = typer.Typer(
    name="ot-transformers",
    help="The optimal-transport geometry of transformers: attention as a flow on measures.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Options are None unless given, so that those given win over the config file, and that over the defaults of
# the study; the defaults live in one place, the study's config class.
Out = Annotated[Path | None, typer.Option(help="Result folder. [default: results/<command>]")]
Config = Annotated[Path | None, typer.Option(help="config.json of an earlier run; options given here win.")]
Tokens = Annotated[
    str | None, typer.Option(help="Bundled cloud or file .npy, .npz, .csv (n, d). [default: minilm]")
]
Kind = Annotated[str | None, typer.Option(help="sinkhorn, softmax, l2 or linear. [default: sinkhorn]")]
Preset = Annotated[
    str | None, typer.Option(help="Named A, V; `list` prints them. [default: head4-symmetric]")
]
Matrices = Annotated[str | None, typer.Option(help=".npz with A and V, or Q, K and V, instead of a preset.")]
Scale = Annotated[float | None, typer.Option(help="Factor of K^T Q of --matrices. [default: 1]")]
Eps = Annotated[float | None, typer.Option(help="Entropic regularisation of Sinkhorn. [default: 1]")]
TEnd = Annotated[float | None, typer.Option(help="End of the time interval. [default: 8; jko: 4]")]
N = Annotated[int | None, typer.Option("--n", help="Tokens kept. [default: all]")]
D = Annotated[int | None, typer.Option("--d", help="Principal components kept. [default: 16]")]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random. [default: 0]")]
Device = Annotated[str | None, typer.Option(help="Torch device. [default: cpu]")]
Dtype = Annotated[str | None, typer.Option(help="float64 or float32. [default: float64]")]
Animate = Annotated[bool | None, typer.Option("--animate", help="Also write flow.gif, also in the report.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result folder only.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from . import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def compare(
    tokens: Tokens = None,
    attention: Kind = None,
    preset: Preset = None,
    matrices: Matrices = None,
    scale: Scale = None,
    eps: Eps = None,
    t_end: TEnd = None,
    n: N = None,
    d: D = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    repeats: Annotated[int | None, typer.Option(help="Gaussian clouds a size. [default: 8]")] = None,
    animate: Animate = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Compare attention on particles, its Gaussian closure, the gradient flow and JKO steps."""
    _run("compare", "CompareConfig", _given(locals()), out, config, quiet)


@app.command()
def flow(
    tokens: Tokens = None,
    attention: Kind = None,
    preset: Preset = None,
    matrices: Matrices = None,
    scale: Scale = None,
    eps: Eps = None,
    t_end: TEnd = None,
    n: N = None,
    d: D = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    animate: Animate = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Run the attention flow on a token cloud and on its Gaussian."""
    _run("flow", "FlowConfig", _given(locals()), out, config, quiet)


@app.command()
def jko(
    tokens: Tokens = None,
    attention: Kind = None,
    preset: Preset = None,
    matrices: Matrices = None,
    scale: Scale = None,
    eps: Eps = None,
    t_end: TEnd = None,
    n: N = None,
    d: D = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    on: Annotated[str | None, typer.Option(help="both, gaussian or particles. [default: both]")] = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Run JKO steps of the energy at several step sizes and measure their order."""
    _run("jko", "JKOConfig", _given(locals()), out, config, quiet)


@app.command()
def convexity(
    tokens: Tokens = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Named A, V; `list` prints them. [default: repulsive, V = I and A = -I]"),
    ] = None,
    matrices: Matrices = None,
    scale: Scale = None,
    eps: Eps = None,
    n: Annotated[int | None, typer.Option("--n", help="Particles a cloud. [default: 8]")] = None,
    d: Annotated[int | None, typer.Option("--d", help="Principal components kept. [default: 2]")] = None,
    curves: Annotated[int | None, typer.Option(help="Curves a family, random measures. [default: 4]")] = None,
    real: Annotated[int | None, typer.Option(help="Curves a family, real tokens. [default: 2]")] = None,
    n_points: Annotated[int | None, typer.Option(help="Times a curve. [default: 17]")] = None,
    starts: Annotated[
        int | None, typer.Option(help="Starts of the search for witnesses. [default: 6]")
    ] = None,
    seed: Seed = None,
    check: Annotated[
        Path | None, typer.Option(help="Prove the certificate in this file again, and stop.")
    ] = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Probe the convexity of the energies along geodesics, and certify witnesses against it."""
    if check is not None:
        _check_certificate(check)
        return
    _run("convexity", "ConvexityConfig", _given(locals()), out, config, quiet)


@app.command()
def reproduce(
    starts: Annotated[int | None, typer.Option(help="Starts of each panel. [default: 8]")] = None,
    draws: Annotated[int | None, typer.Option(help="Random flows a histogram. [default: 100]")] = None,
    rank_t_end: Annotated[float | None, typer.Option(help="Time to which they run. [default: 1e5]")] = None,
    seed: Seed = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Reproduce the numerical section of the paper: cone trajectories, limit ranks, blow-up against growth."""
    _run("reproduce", "ReproduceConfig", _given(locals()), out, config, quiet)


@app.command()
def phase(
    attention: Annotated[str | None, typer.Option(help="softmax, l2 or sinkhorn. [default: softmax]")] = None,
    points: Annotated[int | None, typer.Option(help="Values of each eigenvalue. [default: 21]")] = None,
    draws: Annotated[int | None, typer.Option(help="Random draws at each point. [default: 4]")] = None,
    low: Annotated[float | None, typer.Option(help="Lowest eigenvalue of A. [default: -1]")] = None,
    high: Annotated[float | None, typer.Option(help="Highest eigenvalue of A. [default: 1]")] = None,
    t_end: Annotated[
        float | None, typer.Option(help="End of each flow. [default: 1e6 for softmax, else 30]")
    ] = None,
    eps: Eps = None,
    seed: Seed = None,
    save: Annotated[
        str | None,
        typer.Option(
            help=".npz saved as the flows are done; a killed run resumes from it, a finished one is read."
        ),
    ] = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Draw how Gaussian flows end over the two eigenvalues of A: class, rank and blow-up time."""
    _run("phase", "PhaseConfig", _given(locals()), out, config, quiet)


@app.command()
def trace(
    text: Annotated[str | None, typer.Option(help="UTF-8 text file. [default: the bundled text]")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder of a Hugging Face model. [default: all-MiniLM-L6-v2]")
    ] = None,
    d: Annotated[
        int | None, typer.Option("--d", help="Principal components for gaussianity. [default: 16 at most]")
    ] = None,
    draws: Annotated[int | None, typer.Option(help="Clouds of Gaussian tokens a layer. [default: 4]")] = None,
    seed: Seed = None,
    out: Out = None,
    config: Config = None,
    quiet: Quiet = False,
) -> None:
    """Measure the theory on the tokens and weights of a real transformer, layer by layer (extra `models`)."""
    _run("trace", "TraceConfig", _given(locals()), out, config, quiet)


def _check_certificate(file: Path) -> None:
    found = import_module(".studies.convexity", __package__).check(str(file))
    if not found.valid:
        typer.echo(f"NOT proved: {found.reason}")
        raise typer.Exit(1)
    low, high = found.enclosure
    typer.echo(f"proved: {found.claim} Second derivative in [{low:.6g}, {high:.6g}].")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {k: v for k, v in values.items() if v is not None and k not in ("out", "config", "quiet")}


def _run(
    study: str, config_class: str, given: dict[str, Any], out: Path | None, config: Path | None, quiet: bool
) -> None:
    """Run one study and print what it found."""
    if given.get("preset") == "list":
        _print_presets()
        return
    module = import_module(f".studies.{study}", __package__)
    from .studies import check_out, config_from_options, load_config

    options = {} if config is None else load_config(config, study)
    settings = config_from_options(getattr(module, config_class), {**options, **given})
    target = check_out(Path("results") / study if out is None else out)
    result = _with_progress(lambda report: module.run(settings, report), quiet)
    folder = result.write(target)
    _print_result(result, folder, quiet)
    if result.exit_status:
        raise typer.Exit(result.exit_status)


def _with_progress(job: Callable[[Callable[[str, float], None]], Any], quiet: bool) -> Any:
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return job(lambda stage, fraction: None)
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(stage: str, fraction: float) -> None:
            bar.update(task, description=stage, completed=fraction)

        return job(report)


def _print_result(result: Any, folder: Path, quiet: bool) -> None:
    if quiet:
        typer.echo(folder)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result.title, title_justify="left", title_style="bold")
    for head, justify in (
        ("finding", "left"),
        ("value", "right"),
        ("tolerance", "right"),
        ("verdict", "left"),
    ):
        table.add_column(head, justify=justify)  # type: ignore[arg-type]
    colour = {"pass": "green", "FAIL": "bold red", "reported": "cyan"}
    for title, value, tolerance, verdict in result.rows():
        table.add_row(title, value, tolerance, f"[{colour[verdict]}]{verdict}[/]")
    console = Console()
    console.print(table)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False)


def _print_presets() -> None:
    from .studies._presets import PRESETS

    for name, item in PRESETS.items():
        typer.echo(f"{name:26s} {item.text}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the app; every failure is one line on stderr and an exit status."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            status = app(args=None if argv is None else list(argv), standalone_mode=False)
    except Exception as err:
        status = _status_of(err)
    if status == INTERRUPTED:  # the parser turns Ctrl-C into this
        _fail("interrupted; nothing was written")
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(err: Exception) -> int:
    """Print a failure that is not a bug in one line and return its exit status; raise any other again."""
    from .errors import InvalidInput, NotConverged, OTTransformersError

    if isinstance(err, typer.Exit):
        return int(err.exit_code)
    message = getattr(err, "format_message", None)
    if message is not None:  # a usage error of the parser
        _fail(message() or "no command given; see --help")
        return 2
    if isinstance(err, OSError):  # a full disk, a place that went away while the study ran
        _fail(f"{err.filename}: {err.strerror}" if err.filename is not None else str(err))
        return 2
    if isinstance(err, OTTransformersError):
        _fail(str(err))
        return 2 if isinstance(err, InvalidInput) or not isinstance(err, NotConverged) else 1
    raise err


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """One line, without the place in the source that Python adds."""
    typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _fail(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    main()
