"""What a run needs, looked at before it starts: facts about the machine, pure checks of them, one report.

`facts` are plain data; `probes` reads them from this machine and `integration.run_facts` from a MaxText config.
The families of checks (`versions`, `hardware`, `parallelism`, `shapes`, `speed`, `precision`, `storage`,
`environment`, `network`) are pure functions from a `Situation` to a `Finding`; `registry` lists them all.
"""
