"""Messages between client and server, by kind, and their contents.

A training batch, with adapters alone on the client::

    client                                   server
    widths     tables of all sites     ->              (AMAQ, when they have changed)
    adapters   payloads of matrices    ->              (when they have changed)
    tokens     ids, labels             ->
                                       <-    loss
                                       <-    adapter_gradients  payloads

and with embeddings and LM head on the client as well::

    widths, adapters                   ->              as above
    embedded   payload                 ->
                                       <-    hidden             payload
    hidden_gradient   payload          ->
                                       <-    adapter_gradients  payloads
                                       <-    embedded_gradient  payload     (where it is used)
                                       <-    gate_sums          float32     (AMAQ)

In evaluation there are no gradients. A server keeps a client's widths, its adapters and the graph
of one forward pass until the connection ends.
"""

from __future__ import annotations

WIDTHS = "widths"
ADAPTERS = "adapters"
TOKENS = "tokens"
LOSS = "loss"
ADAPTER_GRADIENTS = "adapter_gradients"
EMBEDDED = "embedded"
HIDDEN = "hidden"
HIDDEN_GRADIENT = "hidden_gradient"
EMBEDDED_GRADIENT = "embedded_gradient"
GATE_SUMS = "gate_sums"
