"""What verl's whole trainer needs to run on a processor, through its own registries, and a look into its batches.

Loaded into every process of a run by ``VERL_USE_EXTERNAL_MODULES=support.cpu_trainer,support.recording`` with this
folder's parent on the path.
"""
