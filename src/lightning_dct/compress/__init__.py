"""What is sent and in how many bits: threshold, selection, residual, payload, and back; on a host
and on a device.
"""
