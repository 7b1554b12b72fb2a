"""The parts of the pretraining example: model, text, data, Lightning modules and plots."""
