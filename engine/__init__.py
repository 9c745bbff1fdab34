"""What runs on top of the cache: the serving engine, its HTTP server and the command line."""

import os

# Threads of torch's CPU kernels wait for each other by spinning, unless told not to before torch is loaded. With the HTTP
# server or anything else on the same cores, spinning makes a step several times slower (measured: 450 ms instead of 100).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
