"""The main job: a language model that learns to search, trained by GRPO + LLDS."""
