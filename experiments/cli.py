"""The ``servegym`` command.

Every command imports what it needs when it runs, so that ``servegym --help`` answers at once.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from servegym._command_line import in_words, leave_pipe, parse_settings

app = typer.Typer(
    name="servegym",
    help="Environments, policies and replay for LLM serving control.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

REPLAYED = {"arrival_s": "time", "prompt_tokens": "tokens", "output_tokens": "outputs"}
"""Columns of a file of requests, see `read_requests`; an output of a replay has them, too."""
Command = TypeVar("Command", bound=Callable[..., Any])


def _fail(message: str) -> NoReturn:
    typer.echo(f"servegym: error: {message}", err=True)
    raise typer.Exit(2)


def _clear_errors(command: Command) -> Command:
    """Turn a user's mistake into one line and exit status 2; other errors stay loud."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            leave_pipe()
            raise typer.Exit(0) from None
        except (ValueError, OSError, ModuleNotFoundError) as error:
            _fail(in_words(error))

    return wrapped  # type: ignore[return-value]


EnvId = Annotated[
    str, typer.Argument(help="Id of an environment, see `servegym list`.", metavar="ENV_ID")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Argument of the environment, key=value; repeatable.", metavar="KEY=VALUE"
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Use a Ray cluster: auto (one that runs), local or local:N (this machine, N workers).",
        metavar="WHERE",
    ),
]


@app.command("list")
@_clear_errors
def list_command() -> None:
    """List environment ids, policies, catalogs, fleets and profiles."""
    import gymnasium

    import servegym  # noqa: F401
    from servegym.agents.lib.checkpoint import card_sentence, shipped
    from servegym.baselines.registry import list_policies
    from servegym.envs.families import FAMILIES
    from servegym.envs.workloads import list_catalogs
    from servegym.hardware_profiles import list_fleets, list_profiles

    def block(title: str, lines: list[str]) -> None:
        typer.echo(f"{title}:")
        for line in lines:
            typer.echo(f"  {line}")

    block("environments", sorted(key for key in gymnasium.registry if key.startswith("servegym/")))
    for family in FAMILIES:
        policies = {
            info.name: info.description + " (clairvoyant)" * info.clairvoyant
            for info in list_policies(family.name)
        }
        policies |= {name: card_sentence(path) for name, path in shipped(family.name).items()}
        width = max(map(len, policies), default=0)
        lines = [f"{name:<{width}}  {description}" for name, description in policies.items()]
        block(f"policies for {family.name}", lines)
    block("catalogs", list(list_catalogs()))
    block("fleets", list_fleets())
    block("profiles", list_profiles())


@app.command()
@_clear_errors
def profiles(
    name: Annotated[
        str | None, typer.Argument(help="One profile, by name or file: what it states.")
    ] = None,
) -> None:
    """List hardware profiles: name, kind and fit error, one a line; or show one of them."""
    from servegym.hardware_profiles import list_moe_layers, list_profiles, load, load_moe

    if name is not None:
        _show_profile(load(name))
        return

    every: list[Any] = [load(name) for name in list_profiles()]
    every += [load_moe(name) for name in list_moe_layers()]
    width = max((len(profile.name) for profile in every), default=0)
    for profile in every:
        typer.echo(f"{profile.name:<{width}}  {profile.kind:<8}  {_fit_error(profile)}")


def _show_profile(profile: Any) -> None:
    """What a profile states of itself, a fact a line."""
    typer.echo(f"{profile.name}: {profile.description}")
    typer.echo(f"{profile.kind}; {_fit_error(profile)}")
    for kind, error in profile.step_error.items():
        if kind == "source":
            continue
        low, high = (
            100 * math.expm1(error["bias"] + sign * 1.2816 * error["sd"]) for sign in (-1, 1)
        )
        typer.echo(
            f"{kind} steps: true time {low:+.1f} % to {high:+.1f} % of the law's, 80 % interval "
            f"(bias {100 * error['bias']:.1f} %, deviation {100 * error['sd']:.1f} %)"
        )
    if not profile.step_error:
        typer.echo("the error of whole steps is not stated")
    shares = ", ".join(f"{key} {value}" for key, value in profile.host.items())
    typer.echo(f"host: {shares or 'kernels alone'}")
    typer.echo(f"KV memory: {profile.kv_capacity_tokens} tokens")
    domain = ", ".join(f"{key} {value}" for key, value in profile.domain.items())
    typer.echo(f"domain: {domain}")
    typer.echo(f"source: {profile.provenance['source']}")


def _fit_error(profile: Any) -> str:
    """The error on whole iterations of held-out rows, worst entry; the file has them all."""
    from servegym.hardware_profiles.law import headline_error

    headline = headline_error(profile.fit_error)
    if headline is None:
        return f"fit error: {profile.fit_error.get('measure', 'none stated')}"
    key, value = headline
    return (
        f"fit error: median {100 * value['median']:.2g} %, p90 {100 * value['p90']:.2g} %, "
        f"max {100 * value['max']:.2g} % ({key}, {value['points']} points)"
    )


@app.command()
@_clear_errors
def warm(
    families: Annotated[
        list[str] | None,
        typer.Argument(help="Families (all), see `servegym list`.", metavar="[FAMILY]..."),
    ] = None,
) -> None:
    """Compile environments and policies ahead, once per machine; each family's seconds."""
    from servegym.envs.families import FAMILIES, family_named
    from servegym.experiments.warm import warm_family

    for family in [family_named(name) for name in families or ()] or FAMILIES:
        typer.echo(f"{family.name}: {warm_family(family):.1f} s")


@app.command()
@_clear_errors
def evaluate(
    env_id: EnvId,
    policy: Annotated[
        list[str],
        typer.Option(
            help="Policy by name, or the path of a checkpoint, .py or SB3 .zip file; repeatable.",
            metavar="NAME_OR_FILE",
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes a policy.")] = 20,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of the first episode; episode i has seed + i. Default: 100000, or with a "
            ".py or .zip file one that nobody knew before.",
        ),
    ] = None,
    set_: Settings = None,
    num_envs: Annotated[
        int | None, typer.Option(min=1, help="Episodes run side by side (default: up to 16).")
    ] = None,
    profile_draws: Annotated[
        int, typer.Option(min=0, help="Repeat in so many draws of the profiles' errors.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the rows to FILE.json or FILE.csv.", metavar="FILE")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Print every metric.")] = False,
    ray: Ray = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Trust policy files: no process of their own.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that such a file may take for an answer (60).")
    ] = None,
) -> None:
    """Compare policies on the same episodes (split eval unless --set split=...)."""
    from servegym.experiments.evaluation.output import check_writable, write_rows

    settings = parse_settings(set_ or [])
    if out is not None:
        check_writable(out, (".json", ".csv"))

    from servegym.agents.lib.parallel import Workers
    from servegym.envs.families import family_of
    from servegym.experiments.evaluation import evaluate as evaluation
    from servegym.experiments.evaluation.play import problem_of
    from servegym.experiments.evaluation.profile_draws import evaluate_draws, print_draws
    from servegym.experiments.evaluation.resolve import resolve

    workers, family = Workers(ray=ray), family_of(env_id)
    problem = problem_of(family.env_id, {"split": "eval", **settings})
    guests: dict[str, Any] = {"view": family.view_of(env_id), "in_process": in_process}
    if time_limit is not None:
        guests["time_limit_s"] = time_limit
    policies = [resolve(name, problem, family, **guests) for name in policy]
    options: dict[str, Any] = {
        "episodes": episodes,
        "num_envs": num_envs,
        "env_kwargs": settings,
        "executor": _with_progress(workers) if sys.stderr.isatty() else workers,
    }
    rows = evaluation.evaluate(env_id, policies, seed=seed, **options)
    drawn: list[dict[str, Any]] = []
    if profile_draws:
        # The same episodes in every draw, also where their seed was made up; not for guests.
        first = min(row["seed"] for row in rows)
        apart = any(row["source"] == "guest" for row in rows)
        drawn = evaluate_draws(env_id, policies, profile_draws, seed=first, apart=apart, **options)
    workers.close()
    if out is not None:
        write_rows(
            out, [{"profile_draw": "none", **row} for row in rows] + drawn if drawn else rows
        )
    evaluation.print_summary(rows, rows.logs, every=all_)
    if drawn:
        print_draws(rows, drawn)


def _with_progress(executor: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """An executor that names every job that has ended in a line of the terminal."""

    def run(function: Any, jobs: Any, names: Any) -> Iterator[Any]:
        for done, (index, result) in enumerate(executor(function, jobs, names), 1):
            end = "\n" if done == len(jobs) else ""
            typer.echo(f"\r\033[K{done}/{len(jobs)}: {names[index]}{end}", nl=False, err=True)
            yield index, result

    return run


@app.command()
@_clear_errors
def replay(
    profile: Annotated[str, typer.Option(help="Profile, see `servegym profiles`.")],
    requests: Annotated[
        Path,
        typer.Option(
            help="CSV or JSONL: arrival_s, prompt_tokens, output_tokens, or a published trace.",
            metavar="FILE",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="CSV of the times of every request, to 1 ns.", metavar="OUT.csv")
    ],
    scheduler: Annotated[str, typer.Option(help="orca or chunked_prefill.")] = "chunked_prefill",
    memory_policy: Annotated[str, typer.Option(help="paged or reserve.")] = "paged",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Running slots.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of an iteration.")
    ] = 2048,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache in tokens (default: the profile's).")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep freed blocks reusable (chunked_prefill only).")
    ] = False,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Plan an iteration while one runs (default: as the profile's engine)."),
    ] = None,
) -> None:
    """Replay a trace of requests on one expert and write each request's times."""
    from servegym._files import write_columns
    from servegym.envs.workloads.traces import read_requests
    from servegym.experiments.evaluation.output import check_writable

    check_writable(out, (".csv",))
    columns = read_requests(requests, lambda _: REPLAYED).columns

    import numpy as np

    from servegym.envs.llm_routing import replay as replay_engine

    result = replay_engine(
        *columns.values(),
        profile=profile,
        scheduler=scheduler,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_tokens=kv_tokens,
        block_size=block_size,
        prefix_caching=prefix_caching,
        async_scheduling=async_scheduling,
        memory_policy=memory_policy,
    )
    columns |= {name: result[name] for name in result.dtype.names or ()}
    lists = {name: np.asarray(values).tolist() for name, values in columns.items()}
    write_columns(out, lists, decimals=9)
    rejected = int((~np.isfinite(result["finish_s"])).sum())
    typer.echo(f"{len(result)} requests, {rejected} rejected; written to {out}")
    for name, unit in (("ttft_s", "s"), ("tpot_s", "s/token"), ("e2e_s", "s")):
        times = result[name][np.isfinite(result[name])]
        if times.size:
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            parts = f"mean {times.mean():.4f}  p50 {p50:.4f}  p90 {p90:.4f}  p99 {p99:.4f}"
            typer.echo(f"{name:<7} {parts} {unit}")


@app.command()
@_clear_errors
def render(
    env_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of an environment, see `servegym list`; by default that of the run, with its "
            "arguments.",
            metavar="[ENV_ID]",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy by name, or the path of a checkpoint or of a run's folder."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the episode.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Decisions to show (100; before a PNG as many as fill it)."),
    ] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames a second of a GIF or MP4.")] = 10,
    set_: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.gif or .mp4 for all steps, FILE.png for the last. Default: RUN/NAME.gif of "
            "a run's folder, else text on the terminal.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Show a policy at work."""
    from servegym.experiments.evaluation.output import check_writable

    settings = parse_settings(set_ or [])
    run = Path(policy) if policy is not None and Path(policy).is_dir() else None
    if run is not None and out is None:
        out = run / f"{run.resolve().name}.gif"
    if out is not None:
        check_writable(out, (".gif", ".png", ".mp4"))
    if env_id is None:
        if run is None:
            raise ValueError("ENV_ID is missing: it is found in the folder of a run alone")
        from servegym.experiments.runs import read_args

        trained = read_args(run)
        settings = trained["env_kwargs"] | settings
        env_id = str(trained["env_id"])

    from servegym.experiments.render import render_episode

    render_episode(env_id, policy, steps, settings, seed=seed, fps=fps, out=out, echo=typer.echo)


@app.command()
@_clear_errors
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of trainings of one family.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="FILE.png (curve.png in the first folder).", metavar="FILE"),
    ] = None,
) -> None:
    """Draw the learning curves of trainings, beside the level of the family's rule."""
    from servegym.experiments.evaluation.output import check_writable, write_text
    from servegym.experiments.runs import draw_runs

    if out is not None:
        check_writable(out, (".png",))
    picture = draw_runs(runs)
    out = out or runs[0] / "curve.png"
    write_text(out, picture)
    typer.echo(f"written to {out}")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@_clear_errors
def figures(
    context: typer.Context,
    family: Annotated[str, typer.Argument(help="A family, see `servegym list`.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Run this figure alone; repeatable.", metavar="NAME")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the figures and stop.")] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw the tables that are there, measure nothing.")
    ] = False,
) -> None:
    """Compute and draw the figures and tables of a family; other words go to each figure.

    Each takes --quick (a smoke run), --episodes N, --figure NAME and --out FOLDER.
    """
    from servegym.envs.families import family_named
    from servegym.experiments.papers.study import list_modules, run_modules

    family = family_named(family).group
    if list_:
        modules = list_modules(family)
        width = max((len(figure.name) for figure in modules), default=0)
        for figure in modules:
            typer.echo(f"{figure.name:<{width}}  {figure.description}")
        return
    words = [*context.args, *(["--draw"] if draw else [])]
    failed = run_modules(family, only or (), words, typer.echo)
    raise typer.Exit(int(failed > 0))


@app.command()
@_clear_errors
def sweep(
    file: Annotated[
        str | None, typer.Argument(help="A sweep file in wandb's format, or a shipped one by name.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Finished runs in the end.")] = 20,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of parameters.")] = 0,
    fixed: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="The agent's argument, before the file's; repeatable.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep (sweeps/NAME).", metavar="FOLDER")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the shipped sweeps, stop.")] = False,
) -> None:
    """Search an agent's hyper-parameters; a sweep that was stopped resumes."""
    from servegym.experiments.sweeps.spec import list_sweeps, read_sweep

    if list_:
        for name in list_sweeps():
            sweep = read_sweep(name)
            searched = ", ".join(sweep.searched)
            typer.echo(f"{name}: {sweep.method} over {searched} of {sweep.program}")
        return
    if file is None:
        raise ValueError(f"name a sweep file or one of {list_sweeps()}")
    chosen = read_sweep(file)

    settings = parse_settings(fixed or [])
    from servegym.experiments.sweeps.run import run_sweep

    run_sweep(chosen, trials, workers, out, seed, settings, typer.echo)


def _add_command(name: str, module: str, summary: str) -> None:
    """Add a command whose module has a parser of its own; its words are passed on untouched."""

    @app.command(
        name,
        help=summary,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    @_clear_errors
    def command(context: typer.Context) -> None:
        main = importlib.import_module(f"servegym.{module}").main
        raise typer.Exit(main(context.args) or 0)


def main() -> None:
    """The command; ``--version`` is answered wherever it stands."""
    if "--version" in sys.argv[1:]:
        from importlib.metadata import version

        print(f"servegym {version('serve-gym')}")
        return
    app()


for _command in (
    (
        "calibrate",
        "hardware_profiles.calibrate.calibrate",
        "Fit a hardware profile to measurements; --check OTHER scores it on others.",
    ),
    (
        "profile",
        "hardware_profiles.compose",
        "Compose a hardware profile of any model on any card: --card, --model, --tp, --dtype.",
    ),
    ("measure", "hardware_profiles.measure.command", "Measure a machine: gpu or server."),
    (
        "fidelity",
        "experiments.fidelity.report",
        "Replay a measured run and print how far the engine is from it.",
    ),
    (
        "leaderboard",
        "experiments.evaluation.leaderboard",
        "Print the standard evaluation of all policies, complete it, or add your policy.",
    ),
    (
        "tune",
        "experiments.evaluation.tuning",
        "Tune a gateway's file on your cards and trace, or the parameters of a routing rule.",
    ),
    (
        "presubmit",
        "experiments.evaluation.presubmit",
        "Play your prefix-aware router against published rules; exit status 1 if it is worse.",
    ),
    ("claims", "experiments.papers.claims", "Print the papers' claims with our results."),
    (
        "real",
        "experiments.live.command",
        "Real inference servers beside the simulator: up, status, down, compare.",
    ),
    (
        "gateway",
        "experiments.live.gateways.command",
        "A policy inside a gateway before your servers: litellm, endpoint-picker.",
    ),
    (
        "serve",
        "experiments.live.serve.command",
        "Serve simulated GPUs as OpenAI-compatible endpoints, to test gateways with.",
    ),
    (
        "bench",
        "experiments.bench",
        "Measure the speed of every environment, with references of the same run.",
    ),
):
    _add_command(*_command)
