"""One HTML page about one model and one sketch: does it pay, where is the noise, what is saved.

    from sketchprop.report import html_report

    measured = sp.measure(model, loss_fn, batches, sp.Tokens(0.3))
    planned = sp.plan(model, loss_fn, batches[0], sketch=sp.Tokens(0.3))
    Path("report.html").write_text(html_report(measured, [planned]), encoding="utf-8")

The page is one file: no script, no font, no picture from elsewhere. On the command line:
``sketchprop report``.
"""

from .page import html_report, setup_facts

__all__ = ["html_report", "setup_facts"]
