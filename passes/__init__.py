"""Graph passes: one file, one job, in the order that ``pipeline`` runs them.

``tag_reshard`` marks the joint graph before it is partitioned; the others rewrite the forward and the backward graph:
``bucket_all_gather``, ``bucket_reduce_scatter``, ``schedule_overlap``, ``lower_layout``. ``verify`` checks any graph.
"""
