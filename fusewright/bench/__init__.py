"""Benchmarks for sceptics: all candidates in one interleaved run, and no wrong result is timed.

`run.bench` measures one problem and returns a `record.Record`. `folder` measures many, each in its
own process. `storage` keeps records as JSON, `regressions` compares two runs, `table` prints. The
core of `verify` decides what is right.
"""
