"""Run NPU code on a machine without an NPU: the released torch_npu on stub CANN libraries. A development tool."""
