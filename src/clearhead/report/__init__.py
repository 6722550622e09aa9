"""The report: recorded attention as a page, one HTML file that opens from disk."""

from clearhead.report.layer import Layer as Layer
from clearhead.report.page import Page as Page
