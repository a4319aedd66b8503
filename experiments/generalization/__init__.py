"""Which large-batch method closes the generalization gap, and by how much?"""
