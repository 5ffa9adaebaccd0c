"""Runs a Ray of one machine until its standard input closes, then stops it. Prints its address as its only line."""

import sys

import ray


def main() -> None:
    folder, num_cpus = sys.argv[1], int(sys.argv[2])
    context = ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=folder,
        log_to_driver=False,
    )
    sys.stdout.write(f"{context.address_info['gcs_address']}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
