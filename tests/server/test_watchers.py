"""How many pages and programs follow jobs, and which ones end."""

from contextlib import ExitStack

from runtime.server.watchers import Watch, Watchers


def test_the_newest_watchers_of_a_user_are_kept() -> None:
    watchers = Watchers(each=2)
    with ExitStack() as open_pages:
        first, second, third = (open_pages.enter_context(watchers.watching("anna")) for _ in range(3))
        other = open_pages.enter_context(watchers.watching("ben"))
        assert [one.ended for one in (first, second, third, other)] == [True, False, False, False]
        assert first.reason is not None and first.reason.data == {"maximum": 2}
    assert second.reason is None


def test_beyond_the_limit_of_all_users_the_user_with_the_most_loses_the_oldest() -> None:
    watchers = Watchers(each=3, most=4)
    with ExitStack() as open_pages:

        def watch(user: str) -> Watch:
            return open_pages.enter_context(watchers.watching(user))

        own = [watch("anna") for _ in range(2)]
        many = [watch("ben") for _ in range(3)]
        assert [one.ended for one in (*own, *many)] == [False, False, True, False, False]
        assert many[0].reason is not None and many[0].reason.data == {"maximum": 4}


def test_a_page_follows_one_job_and_a_program_several() -> None:
    watchers = Watchers(each=4)
    with (
        watchers.watching("anna", "page") as first,
        watchers.watching("anna", "page") as second,
        watchers.watching("ben", "page") as another,
        watchers.watching("anna") as program,
        watchers.watching("anna") as the_same,
    ):
        assert first.ended and first.reason is None
        assert not (second.ended or another.ended or program.ended or the_same.ended)


def test_those_that_left_are_not_counted() -> None:
    watchers = Watchers(each=1, most=1)
    for _ in range(3):
        with watchers.watching("anna") as one:
            assert not one.ended
        assert one.reason is None
