"""Measurements that a sceptic accepts: all candidates in one interleaved run, nothing wrong timed.

`run.bench` measures one problem and gives a `record.Record`; `folder` does so for many, each in
its own process; `storage` keeps records as JSON; `changes` compares two runs; `table` prints.
"""
