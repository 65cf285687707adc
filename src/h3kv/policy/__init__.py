"""Pure decisions: functions from small values to small values. No I/O, no clock, no tensors."""
