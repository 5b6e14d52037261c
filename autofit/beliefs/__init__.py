"""What is believed of configurations that were not tried: their speed (`speed`, `microstep`) and whether they fit (`predict`,
`learned_memory`), learned from trials over a physical form. numpy only.
"""
