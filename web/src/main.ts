// What a home of the lens needs: somewhere to show it, and where its trace is.

export { mount, type Settings } from "./app";
export { embedded, opened, type Source } from "./source";
export { live } from "./live";
