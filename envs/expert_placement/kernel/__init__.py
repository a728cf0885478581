"""Jitted engine of the expert placement family: an exact event-driven simulation of Eq. 1.

One system is a ``Plant`` (servers, links, GPUs), a ``Load`` (requests and the experts that their
tokens go to) and a ``State`` (clocks, queues, placement, sums). All chance is drawn before;
``run`` advances the state to a given time.

A step of a request (its prefill, or one decode step) passes the layers one by one: first the rest
of the layer on the home server's first GPU, then one call for each expert that has tokens. A local
call queues at a GPU of the server; a remote one goes through the sender's link, its latency, the
staging of activations, the remote GPU, staging back and the remote server's link. GPUs and links
are FIFO, so that each is one number, the time at which it falls free. The layer ends with its
slowest call. Expert (l, e) has the number ``l * E + e``.

Placement changes are carried out on the same resources: each GPU loads its new experts one after
another, over PCIe or in chunks over the links; an expert on no other GPU is given up only when a
new copy serves, with one staging slot a GPU on top of its slots.

With a ``Cache`` servers do not help each other: every server has all experts in host memory and its
GPUs cache some. A call whose expert is not there fetches it over PCIe, one fetch after another on
each GPU, and runs on that GPU. Where the cache is None, numba leaves out all of that, and where it
is given all of the other.

A router may send a request, as a whole, to another server than its own when it arrives. With
``FORWARD`` its hidden states go on to servers that hold the next layers whole, on a path chosen
when it arrives; its KV cache stays where its layers ran, so that every step takes that path.

Units are seconds, bytes and tokens. Modules: ``tables`` (records and named tables), ``events`` (the
queue of events), ``calls`` (calls of experts on other servers), ``caching`` (servers with caches),
``routing`` (which server takes a request), ``forwarding`` (paths over whole layers), ``migration``
(loads of a new placement), ``simulation`` (the loop over events).
"""
