"""Stand-ins for buffers that inference engines write by hand: their interfaces, on the pool.

One module an engine; none of them imports that engine.
"""
