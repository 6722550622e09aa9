"""The report page: attention that was captured, as one HTML file that opens from disk."""

from clearhead.report.layer import Layer as Layer
from clearhead.report.page import render as render
