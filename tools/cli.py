"""`usp`: one command line for all tools. A tool is imported only when it is called."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from usp.tools.config import Convert, Train
from usp.tools.config_bench import Bench
from usp.tools.config_eval import Eval
from usp.tools.config_plan import Plan

Command = (
    Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[Convert, tyro.conf.subcommand("convert", prefix_name=False)]
    | Annotated[Eval, tyro.conf.subcommand("eval", prefix_name=False)]
    | Annotated[Plan, tyro.conf.subcommand("plan", prefix_name=False)]
    | Annotated[Bench, tyro.conf.subcommand("bench", prefix_name=False)]
)


def parse(command: Any, *, prog: str, args: Sequence[str] | None = None) -> Any:
    """The configuration from the command line; help and usage errors are printed by rank 0 alone."""
    said = int(os.environ.get("RANK", "0")) == 0
    return tyro.cli(command, prog=prog, args=args, console_outputs=said)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `usp`."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["train"]:
        from usp.tools.train import main as train

        return train(words[1:], prog="usp train")
    if words[:1] == ["eval"]:
        from usp.tools.eval import main as evaluate

        return evaluate(words[1:], prog="usp eval")
    command = parse(Command, prog="usp", args=words)
    try:
        if isinstance(command, Plan):
            from usp.tools.plan import plan

            return print(plan(command))
        if isinstance(command, Bench):
            from usp.tools.bench.main import bench

            return bench(command, words[1:])
        from usp.tools.convert import convert

        convert(command)
    except (ValueError, OSError) as e:
        raise SystemExit(f"error: {e}") from None


if __name__ == "__main__":
    main()
