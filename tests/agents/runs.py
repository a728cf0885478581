"""What the tests of the agents' runs share: their logs, and a run that is cut off and goes on."""

import json

import pytest


def lines(run):
    """The log without what the clock decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("charts/SPS", "charts/cpu_s")} for row in rows
    ]


def assert_goes_on(agent, tiny, tmp_path, monkeypatch, every, **settings):
    """A run killed after its first snapshot and resumed has the log of an uninterrupted one.

    ``agent`` is the module, ``tiny`` makes its arguments, ``every`` are the steps to a snapshot.
    """
    whole = lines(agent.train(tiny(tmp_path, run_name="whole", **settings)))
    save_snapshot = agent.save_snapshot

    def killed(path, **content):
        save_snapshot(path, **content)
        raise KeyboardInterrupt

    args = tiny(tmp_path, run_name="cut", checkpoint_every=every, **settings)
    monkeypatch.setattr(agent, "save_snapshot", killed)
    with pytest.raises(KeyboardInterrupt):
        agent.train(args)
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 99999}\n')  # written after the snapshot, before the end
    monkeypatch.setattr(agent, "save_snapshot", save_snapshot)
    args.resume = True
    assert lines(agent.train(args)) == whole
