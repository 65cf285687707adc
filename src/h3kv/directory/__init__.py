"""Where blocks lie on the nodes, as the nodes say it: hints until their owner confirms them."""
