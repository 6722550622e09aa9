"""`--kernels DIR`: test the compiled kernels of another build, such as the one that `make sanitize` makes."""

import other_kernels


def pytest_addoption(parser):
    parser.addoption("--kernels", metavar="DIR", help="a folder with a build of clearhead.engines.native._kernels")


def pytest_configure(config):
    folder = config.getoption("--kernels")
    if folder:
        other_kernels.use(folder)
