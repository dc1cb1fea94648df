"""What holds for all tests."""

import signal

# A shell starts what it runs in the background with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
